"""The work of `python bench.py smollm2` by TRL, for comparison: seconds a step, and held-out score.

    pip install trl; python tests/peer_trl.py FOLDER [STEPS] [SEED]     # a folder of SmolLM2

The same prompts in the same order, as many answers, the same limit, learning rate and float32
weights, products in bfloat16 as in `--dtype auto`; everything else is TRL's default.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from lab.campaigns import SMOLLM2
from reward import task_of
from runtime.config import Config
from runtime.devices import quick_dtype

PROMPTS, ANSWERS = SMOLLM2["groups_per_step"], SMOLLM2["group_size"]


def chat(prompt: str) -> list[dict]:
    return [{"role": "user", "content": prompt}]


@torch.no_grad()
def held_out(model, tokenizer, task) -> float:
    """The share of held-out problems that a greedy answer solves."""
    problems = [task.reset(i, "eval") for i in range(task.eval_size)]
    chats = [chat(problem["prompt"]) for problem in problems]
    how = {"add_generation_prompt": True, "padding": True, "return_dict": True}
    inputs = tokenizer.apply_chat_template(chats, return_tensors="pt", **how)
    found = model.generate(**inputs, do_sample=False, max_new_tokens=task.turn_tokens)
    texts = tokenizer.batch_decode(found[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    pairs = zip(problems, texts, strict=True)
    return sum(task.step(p, [text]).reward >= 1 for p, text in pairs) / len(problems)


class Clock(TrainerCallback):
    """The seconds of every step."""

    def __init__(self):
        self.seconds, self.since = [], time.monotonic()

    def on_step_begin(self, *_, **__):
        self.since = time.monotonic()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.monotonic() - self.since)
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.1f} s", flush=True)


def main(folder: str, steps: int = 30, seed: int = 0) -> None:
    task = task_of(Config(model=folder, chat="yes", task="add", seed=seed))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    problems = [task.reset(i, "train") for i in range(PROMPTS * steps)]
    rows = [{"prompt": chat(p["prompt"]), "answer": p["answer"]} for p in problems]

    def reward(completions, answer, **_):
        said = [completion[0]["content"] for completion in completions]
        pairs = zip(said, answer, strict=True)
        return [task.step({"answer": right}, [text]).reward for text, right in pairs]

    config = GRPOConfig(
        output_dir="runs/trl",
        per_device_train_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=task.turn_tokens,
        learning_rate=SMOLLM2["lr"],
        max_steps=steps,
        bf16=quick_dtype("cpu") == "bfloat16",
        use_cpu=True,
        shuffle_dataset=False,
        seed=seed,
        save_strategy="no",
        report_to="none",
        logging_steps=1000,
    )
    clock = Clock()
    print(f"held out, before: {held_out(model, tokenizer, task):.3f}", flush=True)
    more = {"processing_class": tokenizer, "callbacks": [clock]}
    trainer = GRPOTrainer(model, reward, config, Dataset.from_list(rows), **more)
    begin = time.monotonic()
    trainer.train()
    mean = (time.monotonic() - begin) / steps
    print(f"held out, after {steps} steps: {held_out(model, tokenizer, task):.3f}")
    print(f"{mean:.1f} s a step in the mean, median {sorted(clock.seconds)[steps // 2]:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
