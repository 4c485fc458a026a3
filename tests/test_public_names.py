"""`import dualres`: quick, without effects on the process, every public name there."""

import json
import os
import subprocess
import sys

import pytest

import dualres

PROCESS = "dict(os.environ), [type(finder).__name__ for finder in sys.meta_path], [str(f) for f in warnings.filters]"


def run(program: str) -> str:
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}  # what this process has set would not be noticed
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_changes_nothing_in_the_process():
    program = f"import os, sys, warnings\nbefore = {PROCESS}\nimport dualres\nassert before == ({PROCESS})"
    run(f"{program}\nassert not {{'torch', 'numpy', 'transformers'}} & set(sys.modules)")


def test_using_it_changes_nothing_either():
    """Beyond what torch itself does to a process."""
    use = "import dualres\nfor name in dualres.__all__: getattr(dualres, name)"
    run(f"import os, sys, warnings, torch\nbefore = {PROCESS}\n{use}\nassert before == ({PROCESS})")


def test_no_module_sets_a_warning_filter():
    """Beyond those of torch and of its sympy: the filters of a run are set when it starts."""
    use = "import dualres.parallel.pipeline, dualres.train.checkpoint"
    run(f"import warnings, sympy, torch\nbefore = [*warnings.filters]\n{use}\nassert before == warnings.filters")


def test_public_names_import_no_compiler():
    """Nor Hugging Face: triton and numba are for the operators that run compiled, and take a fifth of torch's time."""
    use = "import dualres\nfor name in dualres.__all__: getattr(dualres, name)"
    run(f"import sys\n{use}\nassert not {{'triton', 'numba', 'transformers'}} & set(sys.modules)")


def test_names_are_listed_and_found():
    listed = json.loads(run("import dualres, json; print(json.dumps([n for n in dir(dualres) if n[0] != '_']))"))
    assert set(dualres.__all__) <= set(listed)
    for name in dualres.__all__:
        assert getattr(dualres, name).__name__ == name
    assert dualres.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dualres.nothing
