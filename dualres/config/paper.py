"""The numbers printed in the paper, each with the config that computes it."""

from typing import NamedTuple


class PrintedCounts(NamedTuple):
    """One row of a parameter table, as printed."""

    scale: str  # our config
    residual: str  # our config
    counts: tuple[str, ...]  # one per column


DENSE_COLUMNS = ("total excl. vocabulary", "total incl. vocabulary")  # in millions
DENSE_COUNTS = (
    PrintedCounts("0.1b", "standard", ("98.325", "182.211")),
    PrintedCounts("0.1b", "attnres-block", ("98.336", "182.222")),
    PrintedCounts("0.1b", "attnres-full", ("98.346", "182.232")),
    PrintedCounts("0.1b", "dar-block", ("98.449", "182.335")),
    PrintedCounts("0.1b", "dar-full", ("98.571", "182.457")),
    PrintedCounts("0.1b", "mhc-4", ("100.292", "184.178")),
    PrintedCounts("0.3b", "standard", ("304.129", "438.347")),
    PrintedCounts("0.3b", "attnres-block", ("304.151", "438.368")),
    PrintedCounts("0.3b", "attnres-full", ("304.170", "438.388")),
    PrintedCounts("0.3b", "dar-block", ("304.377", "438.595")),
    PrintedCounts("0.3b", "dar-full", ("304.621", "438.839")),
    PrintedCounts("0.3b", "mhc-4", ("308.062", "442.280")),
    PrintedCounts("0.5b", "standard", ("491.572", "659.345")),
    PrintedCounts("0.5b", "attnres-block", ("491.599", "659.372")),
    PrintedCounts("0.5b", "attnres-full", ("491.624", "659.396")),
    PrintedCounts("0.5b", "dar-block", ("491.882", "659.655")),
    PrintedCounts("0.5b", "dar-full", ("492.187", "659.959")),
    PrintedCounts("0.5b", "mhc-4", ("496.489", "664.261")),
    PrintedCounts("1b", "standard", ("1,069.631", "1,338.067")),
    PrintedCounts("1b", "attnres-block", ("1,069.674", "1,338.110")),
    PrintedCounts("1b", "dar-block", ("1,070.127", "1,338.563")),
)

MOE_COLUMNS = (*DENSE_COLUMNS, "active excl. vocabulary", "active incl. vocabulary")  # in billions
MOE_COUNTS = (
    PrintedCounts("moe-7b", "standard", ("6.949", "7.217", "1.136", "1.404")),
    PrintedCounts("moe-7b", "attnres-block", ("6.949", "7.217", "1.136", "1.404")),
    PrintedCounts("moe-7b", "dar-block", ("6.949", "7.218", "1.136", "1.405")),
)

MOE_DAR_OVER_ATTNRES = "0.363"  # millions; "DAR adds approximately 0.363M total and active parameters"


class PrintedLoss(NamedTuple):
    """One cell of a validation-loss table, as printed."""

    scale: str  # our config
    residual: str  # our config
    name: str  # the paper's name of the method
    loss: str


_SWEPT = (  # method, at 0.1b, 0.3b and 0.5b
    ("standard", "Baseline", ("3.577", "2.866", "2.796")),
    ("dar-block", "DAR-Block", ("3.504", "2.803", "2.674")),
    ("dar-full", "DAR-Full", ("3.515", "2.804", "2.653")),
    ("attnres-block", "AttnRes-Block", ("3.572", "2.823", "2.754")),
    ("attnres-full", "AttnRes-Full", ("3.541", "2.827", "2.708")),
    ("mhc-4", "mHC-4", ("3.531", "2.844", "2.764")),
)
SIZE_SWEEP = tuple(  # "Validation loss in the small-scale dense suite"
    PrintedLoss(scale, residual, name, losses[column])
    for column, scale in enumerate(("0.1b", "0.3b", "0.5b"))
    for residual, name, losses in _SWEPT
)

KV_ABLATION = (  # "Key–value retrieval ablations in the 0.5B Full setting under parameter-matched training"
    PrintedLoss("0.5b", "attnres-full", "AttnRes", "2.708"),
    PrintedLoss("0.5b-vproj", "attnres-vproj-96", "AttnRes + VProj", "2.757"),
    PrintedLoss("0.5b", "dar-selfkv", "DAR-SelfKV", "2.678"),
    PrintedLoss("0.5b", "dar-fixedkv", "DAR-FixedKV", "2.690"),
    PrintedLoss("0.5b", "dar-crossv", "DAR-CrossV", "2.664"),
    PrintedLoss("0.5b", "dar-full", "DAR", "2.653"),
)


class PrintedScores(NamedTuple):
    """One method's row of an evaluation table, as printed: 1b with standard, attnres-block or dar-block."""

    name: str  # the paper's name of the method
    scores: tuple[str, ...]  # one per column


FIT_COLUMNS = ("Val. loss", "Token PPL", "Byte PPL", "BPB")  # FineWeb-Edu, then Paloma; "lower is better"
FIT = (  # "Language-model fit for the 1B models"
    PrintedScores("Baseline", ("2.716", "21.575", "2.040", "1.029")),
    PrintedScores("AttnRes", ("2.704", "20.707", "2.021", "1.015")),
    PrintedScores("DAR", ("2.684", "20.264", "2.011", "1.008")),
)

# In percent; "higher is better; Avg. is the unweighted mean across tasks"
ZERO_SHOT_COLUMNS = (
    *("HellaSwag", "PIQA", "ARC-E", "WinoGrande", "BoolQ", "OpenBookQA", "SocialIQA", "SciQ"),
    "Avg.",
)
ZERO_SHOT = (  # "Zero-shot performance (%) of the 1B models"
    PrintedScores("Baseline", ("53.96", "72.14", "49.92", "53.67", "61.16", "33.00", "40.02", "72.40", "54.53")),
    PrintedScores("AttnRes", ("54.65", "73.94", "52.10", "53.83", "58.84", "31.40", "40.84", "76.00", "55.20")),
    PrintedScores("DAR", ("55.35", "73.01", "51.30", "54.22", "62.45", "33.20", "40.94", "74.60", "55.63")),
)


class PrintedSource(NamedTuple):
    """One of Paloma's sixteen sources: token perplexity of the 1B models, as printed."""

    group: str
    perplexity: tuple[str, str, str]  # by method, as in `PALOMA_METHODS`


PALOMA_METHODS = ("Baseline", "AttnRes", "DAR")
PALOMA = (  # "Token perplexity across the 16 reported Paloma domain groups for the 1B models"
    PrintedSource("4chan", ("631.49", "518.60", "536.45")),
    PrintedSource("C4 100 Domains", ("37.56", "37.16", "35.98")),
    PrintedSource("C4", ("44.04", "43.75", "42.33")),
    PrintedSource("Dolma v1.5", ("102.37", "96.63", "93.23")),
    PrintedSource("100 Programming Langs.", ("41,241.97", "24,985.74", "23,731.25")),
    PrintedSource("100 Subreddits", ("87.58", "86.48", "84.12")),
    PrintedSource("Falcon RefinedWeb", ("51.08", "50.27", "48.79")),
    PrintedSource("Gab", ("8,203.23", "7,966.30", "7,435.71")),
    PrintedSource("M2D2 S2ORC", ("52.05", "49.84", "48.26")),
    PrintedSource("M2D2 Wikipedia", ("47.63", "46.86", "45.35")),
    PrintedSource("Manosphere", ("94.71", "93.53", "91.01")),
    PrintedSource("mC4", ("76.08", "73.76", "71.39")),
    PrintedSource("PTB", ("53.38", "50.92", "47.78")),
    PrintedSource("RedPajama", ("590.75", "508.56", "501.21")),
    PrintedSource("Twitter AAE", ("8,396.23", "8,083.35", "7,606.84")),
    PrintedSource("Wikitext-103", ("28.06", "26.86", "26.31")),
)


class PrintedGap(NamedTuple):
    """One panel of the write-gate and rescue figure at 0.5B, as printed."""

    residual: str  # our config
    name: str  # the paper's name of the method
    gap: str  # mean absolute write gap
    correlation: str  # between write and rescue gaps across layers


GATE_RESCUE = (PrintedGap("dar-full", "DAR", "0.18", "0.23"), PrintedGap("dar-selfkv", "DAR-SelfKV", "0.49", "0.82"))
PRESETS = {"size-sweep": SIZE_SWEEP, "kv-ablation": KV_ABLATION}  # for `dualres suite`
