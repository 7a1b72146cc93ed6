from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kernels

REPO_ROOT = Path(__file__).resolve().parents[3]


def test_kernels_package_is_ours_and_empty() -> None:
    assert kernels.__file__ is not None
    assert Path(kernels.__file__) == REPO_ROOT / "kernels" / "__init__.py"
    assert not (REPO_ROOT / "kernels" / "__init__.py").read_text()


def test_transformers_imports_and_runs_with_our_package_on_the_path() -> None:
    # transformers probes for a package of this name; a fresh process sees its first import.
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "import torch, transformers, kernels\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, vocab_size=32,\n"
        "    num_hidden_layers=1, num_attention_heads=2)\n"
        "transformers.LlamaForCausalLM(config)(torch.tensor([[1, 2]]))\n"
        "print(kernels.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO_ROOT, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == REPO_ROOT / "kernels" / "__init__.py"


def test_reference_needs_no_triton() -> None:
    # In a process where importing triton fails, as on a machine that has none.
    program = (
        "import sys; sys.path.insert(0, '.'); sys.modules['triton.language'] = None\n"
        "import kernels.reference\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPO_ROOT, check=True)
