"""A folder of published weights as transformers reads it, and as this project does, in float32.

pip install transformers; PYTHONPATH=.:tests python tests/peer_transformers.py FOLDER
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from folder_run import same_answers

from model import GPT, ModelConfig, pack_tokens
from runtime.huggingface import load_weights, read_shape
from runtime.tokenizer import FolderTokenizer

QUESTIONS = "Why is the sky blue?", "Write a poem about the sea.", "Count from one to thirty."
SYSTEMS = [], [{"role": "system", "content": "Be brief."}], [{"role": "system", "content": "é <"}]
PIECES = (
    "<|im_start|> <|im_end|> <|endoftext|> é 日本 🙂 a b x Z 0 1 89 . , ( ; { 's the of def".split()
)
PIECES += [" ", "  ", "\n", "\t", " learning", " 3.14"]

folder, chance = Path(sys.argv[1]), random.Random(0)
texts = ["".join(chance.choices(PIECES, k=chance.randint(0, 40))) for _ in range(10_000)]
vocabulary = transformers.AutoTokenizer.from_pretrained(folder)
theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
ours = GPT(ModelConfig(**read_shape(folder, 1024)), None)
load_weights(ours, folder)
ids = torch.tensor(vocabulary(" ".join(texts)).input_ids[:1024])
with torch.no_grad():
    wanted = theirs(ids[None]).logits[0]
    apart = (ours.logits(ours(pack_tokens([ids.numpy()]))) - wanted).abs()
for length in 64, 1024:
    largest = float(wanted[:length].abs().max())
    print(f"logits of {length} tokens: {apart[:length].max():.1e} apart, the largest {largest:.1f}")
problems = Path(tempfile.mkdtemp()) / "questions.jsonl"
problems.write_text("\n".join(json.dumps({"prompt": q, "answer": "?"}) for q in QUESTIONS))
print("the same greedy answers of 64 tokens:", same_answers(folder, f"jsonl:{problems}:any:64"))
plain, same, how = FolderTokenizer(folder), 0, {"add_generation_prompt": True, "return_dict": False}
alike = sum(plain.encode_prompt(text) == vocabulary(text).input_ids for text in texts)
for system in SYSTEMS:
    chat = FolderTokenizer(folder, True, system[0]["content"] if system else "")
    for text in texts[:100]:
        turns = [*system, {"role": "user", "content": text}]
        same += chat.encode_prompt(text) == vocabulary.apply_chat_template(turns, **how)
print(f"texts with the same ids: {alike} of {len(texts)}; chats: {same} of 300")
