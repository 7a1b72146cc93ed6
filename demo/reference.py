"""What transformers answers to the same prompts: greedy, fp32, in a process of its own.

`python -m demo.reference MODEL_DIR IN.json OUT.json`; IN holds `{"prompts": [text], "max_tokens":
N}`, each text a user's turn, OUT a list of `{"prompt_token_ids": [...], "token_ids": [...]}`.
Sequences do not end at end-of-sequence tokens.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any


def greedy(model_dir: Path, prompts: list[str], max_tokens: int) -> list[dict[str, list[int]]]:
    """Generate for all prompts as one batch, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Threads that wait for each other on a busy machine cost far more than they bring.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    print("transformers: loading", flush=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompt_ids: list[list[int]] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        for prompt in prompts
    ]
    longest = max(map(len, prompt_ids))
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompt_ids):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        mask[row, longest - len(ids) :] = 1

    def report(ids: Any, scores: Any, **_: Any) -> Any:
        print(f"transformers: {ids.shape[1] - longest} of {max_tokens} tokens", flush=True)
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[report],
        )
    return [
        {"prompt_token_ids": ids, "token_ids": row[longest:].tolist()}
        for ids, row in zip(prompt_ids, output, strict=True)
    ]


def main() -> int:
    model_dir, in_path, out_path = map(Path, sys.argv[1:])
    task = json.loads(in_path.read_text(encoding="utf-8"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = greedy(model_dir, task["prompts"], task["max_tokens"])
    out_path.write_text(json.dumps(answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
