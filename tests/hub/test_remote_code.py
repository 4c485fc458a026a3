"""A saved model carries its code, and loads without dualres."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dualres.hub import remote_code
from tests.hub.test_hf_model import small
from tests.small import random_tokens, relative_error

WITHOUT_DUALRES = """
import json, sys
from pathlib import Path
sys.path = [p for p in sys.path if not (Path(p or ".") / "dualres" / "__init__.py").exists()]
import torch, transformers
torch.library.Library._destroy = lambda library: sys.exit(f"{library} was registered again and freed")
tokens = torch.tensor(json.loads(sys.argv[2]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "dualres" not in sys.modules
with torch.no_grad():
    logits = model(tokens).logits
again = Path(sys.argv[1]) / "again"
model.save_pretrained(again)
copy = transformers.AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
with torch.no_grad():
    assert torch.equal(copy(tokens).logits, logits)
greedy = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens), "eos_token_id": None}
assert torch.equal(model.generate(tokens, **greedy), model.generate(tokens, **greedy, use_cache=False))
model.train()(tokens, labels=tokens).loss.backward()
print(json.dumps(logits.tolist()))
"""


@pytest.mark.parametrize(
    ("residual", "feedforward", "name"),
    [
        ("dar-block", "moe", "modèle 模型"),
        pytest.param("standard", "dense", "model", marks=pytest.mark.slow),
        pytest.param("mhc-4", "dense", "model", marks=pytest.mark.slow),
        pytest.param("attnres-vproj", "dense", "model", marks=pytest.mark.slow),
    ],
)
def test_loads_and_learns_where_dualres_is_not(residual: str, feedforward: str, name: str, tmp_path: Path):
    model, tokens = small(residual, feedforward), random_tokens(2, 9)
    model.save_pretrained(tmp_path / name)
    with torch.no_grad():
        wanted = model(tokens).logits
    environment = {"HF_HOME": str(tmp_path / "cache"), "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_DUALRES, str(tmp_path / name), json.dumps(tokens.tolist())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert relative_error(torch.tensor(json.loads(done.stdout.splitlines()[-1])), wanted) < 1e-5


def test_every_file_is_python_and_imports_none_of_ours_by_name():
    for name, text in remote_code.code().items():
        compile(text, name, "exec")
        assert "from dualres" not in text, name
        assert text.splitlines()[1].startswith('"""'), name
