"""A dualres model among those of `transformers`: loading, caches, generation, pipelines, training."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache

from dualres.data.tokenizer import byte_tokenizer
from dualres.hub.hf_model import DualResForCausalLM
from dualres.hub.open_model import as_transformers
from dualres.model.generation import generate
from tests.hub.family import some_first
from tests.small import (
    FEEDFORWARDS,
    MOE,
    RESIDUALS,
    model_config,
    next_token_loss,
    random_tokens,
    real_text,
    relative_error,
    stirred,
)

END = 96  # of the vocabulary of 97
FAST_MOE = ("mhc-4", "dar-block")

MODELS = [  # every method with a dense feed-forward, two with experts; the product only before a release
    pytest.param(residual, kind, marks=() if kind == "dense" or residual in FAST_MOE else pytest.mark.exhaustive)
    for residual in RESIDUALS
    for kind in FEEDFORWARDS
]


def small(residual: str = "dar-block", feedforward: str = "dense", **changes: Any) -> Any:
    decoder = stirred(model_config(feedforward, **changes), RESIDUALS[residual], noise=0.1)
    return DualResForCausalLM.of(decoder, eos_token_id=END, pad_token_id=END).eval()


@pytest.mark.parametrize(("residual", "feedforward"), MODELS)
def test_save_and_load_give_the_same_logits_bit_for_bit(residual: str, feedforward: str, tmp_path: Path):
    model, tokens = small(residual, feedforward), random_tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        wanted = model(tokens).logits
        assert torch.equal(wanted, model.decoder(tokens))
        assert torch.equal(loaded(tokens).logits, wanted)
    assert isinstance(loaded, DualResForCausalLM)
    assert AutoConfig.from_pretrained(tmp_path).residual_config == loaded.decoder.residual_config


def test_a_fresh_process_needs_only_the_import(tmp_path: Path):
    model = small()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2  # sharded when large
    with torch.no_grad():
        wanted = model(random_tokens(2, 9)).logits
    program = (
        "import torch, dualres.hub\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"  # products split otherwise may round otherwise
        "from transformers import AutoModelForCausalLM\n"
        "from tests.small import random_tokens\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "with torch.no_grad(): print(model(random_tokens(2, 9)).logits.flatten().view(torch.int32).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == wanted.flatten().view(torch.int32).tolist()


@pytest.mark.parametrize(("residual", "feedforward"), MODELS)
def test_cached_generation_equals_uncached_and_our_own(residual: str, feedforward: str):
    model, prompts = small(residual, feedforward), random_tokens(3, 7, vocab_size=96)
    mask = torch.ones_like(prompts)
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    cached = model.generate(prompts, **settings)
    assert torch.equal(cached, model.generate(prompts, **settings, use_cache=False))
    assert cached[:, 7:].tolist() == generate(model.decoder, prompts.tolist(), 12)


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("residual", ["standard", "mhc-4", "attnres-full", "dar-block"])
def test_the_standard_caches_step_by_step(residual: str, cache: type):
    """Several tokens, then one by one, against one pass over all."""
    model, tokens = small(residual), random_tokens(2, 15)
    sized = {"max_cache_len": 20} if cache is StaticCache else {}
    past = cache(config=model.config, **sized)
    with torch.no_grad():
        wanted = model(tokens).logits
        found = [model(tokens[:, :6], past_key_values=past).logits]
        found.append(model(tokens[:, 6:10], past_key_values=past).logits)
        found += [model(tokens[:, t : t + 1], past_key_values=past).logits for t in range(10, 15)]
    assert relative_error(torch.cat(found, 1), wanted) < 1e-5


@pytest.mark.parametrize("residual", some_first(RESIDUALS, "standard", "mhc-2", "attnres-full", "dar-block"))
def test_left_padded_batches_generate_as_alone(residual: str):
    model = small(residual)
    prompts = [random_tokens(1, n, vocab_size=96, seed=n)[0].tolist() for n in (9, 4, 1)]
    tokens = torch.tensor([[END] * (9 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    together = model.generate(tokens, attention_mask=mask, **settings)[:, 9:]
    for row, prompt in zip(together, prompts, strict=True):
        alone = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), **settings)
        assert row.tolist() == alone[0, len(prompt) :].tolist()


def test_sampling_with_a_seed_equals_a_plain_loop():
    model, prompt = small(), random_tokens(2, 5, vocab_size=96)
    settings: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    torch.manual_seed(7)
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, **settings)
    torch.manual_seed(7)
    wanted = prompt
    with torch.no_grad():
        for _ in range(10):
            scores = model.decoder(wanted)[:, -1] / 0.7
            scores[scores < scores.topk(20).values[:, -1:]] = -torch.inf
            ordered, order = scores.sort(descending=False)
            outside = ordered.softmax(-1).cumsum(-1) <= 1 - 0.9
            outside[:, -1:] = False
            scores[outside.scatter(1, order, outside)] = -torch.inf
            wanted = torch.cat([wanted, torch.multinomial(scores.softmax(-1), 1)], 1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("residual", ["standard", "dar-block"])
def test_beam_search_equals_a_plain_one(residual: str):
    model, prompt = small(residual), random_tokens(1, 5, vocab_size=96)
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        eos_token_id=None,
        num_beams=4,
        max_new_tokens=7,
        do_sample=False,
    )
    assert torch.equal(found, _beam_search(model, prompt, beams=4, new=7))


@torch.no_grad()
def _beam_search(model: Any, prompt: Tensor, beams: int, new: int) -> Tensor:
    """Keep the best `beams` continuations by their log-probability, all of one length, and take the best at the end."""
    kept = [(0.0, prompt[0].tolist())]
    for _ in range(new):
        longer = []
        for score, tokens in kept:
            logs = model.decoder(torch.tensor([tokens]))[0, -1].log_softmax(-1)
            longer += [(score + logs[token].item(), [*tokens, token]) for token in range(len(logs))]
        kept = sorted(longer, reverse=True)[:beams]
    return torch.tensor([kept[0][1]])


def test_pipeline(tmp_path: Path):
    tokenizer = byte_tokenizer()
    model = small(vocab_size=257)
    model.save_pretrained(tmp_path)
    as_transformers(tokenizer, 64).save_pretrained(tmp_path)
    run = transformers.pipeline("text-generation", model=str(tmp_path))
    prompts = ["hello there", "é"]
    found = run(prompts, max_new_tokens=6, do_sample=False, batch_size=2)
    for prompt, [answer] in zip(prompts, found, strict=True):
        [tokens] = generate(model.decoder, [tokenizer.encode(prompt)], 6)
        assert answer["generated_text"] == tokenizer.decode(tokenizer.encode(prompt) + tokens)


@pytest.mark.parametrize("residual", ["standard", "mhc-4", "attnres-block", "dar-block"])
def test_gradient_checkpointing_gives_the_same_gradients(residual: str):
    tokens = random_tokens()
    gradients = []
    for recompute in (False, True):
        model = small(residual).train()
        if recompute:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        ran = _count_runs(model)
        model(tokens, labels=tokens).loss.backward()
        assert ran[0] == (2 if recompute else 1) * len(model.decoder.stack.blocks)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    model.gradient_checkpointing_disable()
    assert {block.recompute for block in model.decoder.stack} == {"none"}


class Adapted(nn.Module):
    """A linear map with a low-rank adapter whose input is dropped, as LoRA has it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(self.drop(x)))


@pytest.mark.parametrize("residual", ["standard", "dar-block"])
def test_gradient_checkpointing_of_adapters_that_drop(residual: str):
    tokens, found = random_tokens(), []
    for recompute in (False, True):
        model = small(residual).train().requires_grad_(False)
        torch.manual_seed(0)
        for module in list(model.decoder.stack.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(module, Adapted):
                    setattr(module, name, Adapted(child))
        if recompute:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        torch.manual_seed(1)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert len(found[0]) > 2
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(*found, strict=True))


def _count_runs(model: Any) -> list[int]:
    count = [0]

    def add(*_: Any) -> None:
        count[0] += 1

    for block in model.decoder.stack:
        block.branches[0].module.register_forward_pre_hook(add)
    return count


@pytest.mark.parametrize("feedforward", some_first(FEEDFORWARDS, "moe"))
def test_trainer_learns_saves_and_resumes(feedforward: str, tmp_path: Path):
    rows = [{"input_ids": row, "labels": row} for row in real_text(48, 32, 0)]
    model = small("dar-block", feedforward, vocab_size=257)
    settings = transformers.TrainingArguments(
        str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        save_steps=6,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=6,
        load_best_model_at_end=True,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    tokens = torch.stack([row["input_ids"] for row in rows[:8]])
    with torch.no_grad():
        wanted = model.eval()(tokens, labels=tokens).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-12")
    with torch.no_grad():
        tokens = real_text(2, 32, 9)
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("recompute", [False, True])
def test_router_losses_follow_the_loss(recompute: bool):
    """Halves of a step give the gradient of the step, and a factor on the loss is one on the router's gradient, too."""
    row = random_tokens(1, 19)
    both = torch.cat([row, row])  # equal rows: the auxiliary loss of a half is that of the whole

    def router_gradient(*pieces: tuple[Tensor, float], whole: int | None = 2 * 18) -> Tensor:
        model = small("dar-block", "moe", moe=dataclasses.replace(MOE, aux_coefficient=10.0)).train()
        if recompute:
            model.gradient_checkpointing_enable()
        share = {} if whole is None else {"num_items_in_batch": torch.tensor(whole)}
        for piece, factor in pieces:
            (factor * model(piece, labels=piece, **share).loss).backward()
        return torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "router" in n])

    wanted = router_gradient((both, 1.0))
    assert wanted.norm() > 0.1
    assert relative_error(router_gradient((row, 1.0), (row, 1.0)), wanted) < 1e-5
    assert relative_error(router_gradient((row, 3.0), (row, 3.0)), 3 * wanted) < 1e-5
    assert relative_error(router_gradient((both, 1.0), whole=None), wanted) < 1e-5


def test_router_losses_with_labels_and_without_are_one():
    """With labels they ride on the loss; without, on the logits, for a loss of one's own."""
    tokens = random_tokens()
    gradients = []
    for given in (True, False):
        model = small("standard", "moe").train()
        out = model(tokens, labels=tokens if given else None)
        loss = out.loss if given else next_token_loss(out.logits, tokens)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "router" in n]))
    assert relative_error(gradients[1], gradients[0]) < 1e-5


def test_positions_come_from_the_mask():
    """Rows padded on the left, by a plain forward; a mask that is longer than the tokens, as static caches have it."""
    model, row = small(), random_tokens(1, 9)
    padded = torch.cat([torch.full((1, 4), END), row], 1)
    mask = torch.cat([torch.zeros(1, 4), torch.ones(1, 9)], 1).long()
    past = StaticCache(config=model.config, max_cache_len=20)
    longer = torch.cat([torch.ones(1, 9), torch.zeros(1, 11)], 1).long()
    with torch.no_grad():
        wanted = model(row).logits
        assert relative_error(model(padded, attention_mask=mask).logits[:, 4:], wanted) < 1e-5
        assert relative_error(model(row, attention_mask=longer, past_key_values=past).logits, wanted) < 1e-5


def test_recomputing_blocks_takes_no_cache():
    model, tokens = small(), random_tokens()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()  # in eval mode
    with pytest.raises(ValueError, match="would append to the cache twice"):
        model(tokens, past_key_values=DynamicCache(config=model.config))
    with torch.no_grad():
        assert model(tokens).past_key_values.get_seq_length() == 19


def test_one_device_or_none(tmp_path: Path):
    small().save_pretrained(tmp_path)
    spread = {"decoder.vocabulary": "cpu", "decoder.norm": "cpu", "decoder.stack": "disk"}
    with pytest.raises(ValueError, match=r"over cpu, disk.*run on one device"):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map=spread, offload_folder=tmp_path / "off")
    assert AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").device.type == "cpu"


def test_only_the_first_process_writes_config_and_code(tmp_path: Path):
    small().save_pretrained(tmp_path / "second", is_main_process=False)
    assert not list((tmp_path / "second").glob("*.py"))
    small().save_pretrained(tmp_path / "first", True)
    assert "auto_map" in json.loads((tmp_path / "first" / "config.json").read_text())


def test_weights_are_never_unpickled(tmp_path: Path):
    model = small()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_old_transformers_is_left_alone(tmp_path: Path):
    """Whoever has one that dualres cannot use can still use it."""
    folder = tmp_path / "transformers" / "models" / "auto"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent, folder.parent.parent):
        (path / "__init__.py").write_text("")
    (folder / "configuration_auto.py").write_text("KNOWN = 1\n")
    program = "import dualres.hub; from transformers.models.auto.configuration_auto import KNOWN; print(KNOWN)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["1"], done.stderr


def test_new_tokens_can_be_added():
    model = small(tied_embeddings=False)
    before = model(random_tokens()).logits
    model.resize_token_embeddings(104, mean_resizing=False)
    assert model.config.vocab_size == model.decoder.vocabulary.table.num_embeddings == 104
    assert torch.equal(model(random_tokens()).logits[..., :97], before)
    assert DualResForCausalLM.of(model.decoder).config.vocab_size == 104


def test_labels_positions_and_embeddings():
    model, tokens = small(), random_tokens()
    labels = tokens.clone()
    labels[:, :5] = -100
    out = model(tokens, labels=labels)
    rows = out.logits[:, 4:-1].flatten(0, 1)
    assert relative_error(out.loss, torch.nn.functional.cross_entropy(rows, tokens[:, 5:].flatten())) < 1e-6
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
    assert torch.equal(embedded, out.logits)
    shifted = model(tokens, position_ids=torch.arange(19)[None] + 11).logits  # rotary attention sees distances
    assert relative_error(shifted, out.logits) < 1e-5
    assert torch.equal(model(tokens, logits_to_keep=3).logits, out.logits[:, -3:])
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        model(tokens, output_hidden_states=True)


def test_tokenizer_beside_it_makes_the_same_tokens(tmp_path: Path):
    ours = byte_tokenizer()
    as_transformers(ours, 64).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("plain", "Grüße, 世界 🙂", ""):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.padding_side == "left"
    assert (theirs.eos_token_id, theirs.model_max_length) == (ours.end_of_text, 64)
