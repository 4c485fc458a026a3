"""Compares runs: `dualres suite` trains and tabulates methods, `dualres report` creates an HTML page.

suite         the runs of a suite: every scale, method, learning rate and seed
runs          reads run folders, and groups runs that differ only in their seed
statistics    means with 95% confidence intervals, differences paired by seed
comparison    one row per group against `standard`, as text and JSON, and the paper's loss tables next to our results
charts        loss curves as data for the page's script and as matplotlib figures
samples       the text that a run's last checkpoint generates
reproduce     the command that reproduces a config
page          the HTML page, from `templates/`: comparison, curves, evaluations, analyses, samples, runs, configs
"""
