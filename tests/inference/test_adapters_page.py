"""The code and the table of docs/adapters.md, taken from the page and run."""

import re
from pathlib import Path

import pytest
import torch

import shoal

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def ran(code: str, **names) -> dict:
    names["shoal"] = shoal
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def example():
    return ran(BLOCKS[-1])


def test_adapters_keep_what_the_network_learned(example):
    assert example["scores"]["accuracy"] > 0.75
    run, network = example["run"], example["network"]
    frozen = run.ensemble.frozen_state
    assert torch.equal(frozen["shared/2.base.weight"], network[2].weight)
    assert sum(t.numel() for t in frozen.values()) == sum(
        p.numel() for p in network[:4].parameters()
    )


def test_heads_train_on_cached_features(example):
    assert set(example["cached"].ensemble.weights) == {"4.weight", "4.bias"}
    assert example["cached"].history[-1]["loss"] < example["cached"].history[0]["loss"]


def test_the_three_lines_run(example):
    """With fewer members and epochs."""
    names = {"network": example["network"], "data": (example["x"], example["y"])}
    short = BLOCKS[0].replace("members=100", "members=3").replace('"f-kde")', '"f-kde", epochs=1)')
    assert ran(short, **names)["run"].ensemble.members == 3


def test_folders_are_exchanged(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = example["run"]
    found = ran(BLOCKS[1], run=run, network=example["network"])["ensemble"]
    torch.testing.assert_close(found(example["x"]), run.ensemble(example["x"]))
    assert (tmp_path / "adapters" / "member-000" / "adapter_config.json").exists()


def test_the_table_of_memory_is_counted():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768,
        image_size=32, patch_size=4, num_labels=10,
    )  # fmt: skip
    network = transformers.ViTForImageClassification(config)
    rows = re.findall(r"^\| (.*) \| ([\d,]+) \| ([\d,.]+) MiB \|$", PAGE.read_text(), re.M)
    assert len(rows) == 5
    total = sum(p.numel() for p in network.parameters())
    for call, each, size in rows:
        member = network
        if call.startswith("`"):
            build = eval(
                f"adapters.{call.strip('`')}", {"adapters": shoal.adapters, "network": network}
            )
            member = build()
        private = sum(p.numel() for p in member.parameters() if p.requires_grad)
        assert f"{private:,}" == each
        frozen = sum(p.numel() for p in member.parameters() if not p.requires_grad)
        assert frozen <= total
        found = 4 * (frozen + 100 * private) / 2**20
        assert found == pytest.approx(float(size.replace(",", "")), rel=0.01)
