"""Compares runs: `dualres suite` trains and tabulates methods, `dualres report` creates an HTML page.

suite         the runs of a suite: every scale, method, learning rate and seed
runs          reads run folders: config, summary, curves
groups        runs that differ only in their seed, with names for tables and curves
statistics    means with 95% confidence intervals, differences paired by seed
comparison    one row per group against `standard`, as text, JSON and HTML
paper_losses  the paper's loss tables next to our results
charts        loss curves as data for the page's script and as matplotlib figures
evaluations   the tables of `dualres evaluate`
reproduce     the command that reproduces a config
page          the HTML page, from `templates/` and `html`; `summary` writes its sentences about the runs
"""
