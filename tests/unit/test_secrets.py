from __future__ import annotations

import pytest

from ddpdoctor.model.secrets import hide_secrets


@pytest.mark.parametrize(
    ("typed", "stored"),
    [
        ("train.py --api-key abc --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --wandb_token=abc --password=x", "train.py --wandb_token=*** --password=***"),
        ("train.py --tokenizer gpt2 --lr 0.1", "train.py --tokenizer gpt2 --lr 0.1"),
        ("train.py --max-tokens=5", "train.py --max-tokens=5"),
        ("TOKEN=abc train.py", "TOKEN=*** train.py"),
        ("train.py", "train.py"),
    ],
)
def test_values_of_secrets_are_hidden(typed: str, stored: str) -> None:
    assert " ".join(hide_secrets(tuple(typed.split()))) == stored
