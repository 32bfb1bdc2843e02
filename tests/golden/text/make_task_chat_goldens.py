"""Writes task_chat.cases.jsonl: what transformers makes of the task vocabulary's files.

Run with transformers 5.24, tokenizers 0.23.3: python make_task_chat_goldens.py BUILD/tests/text/text_make_task_files > task_chat.cases.jsonl.
"""
import json
import subprocess
import sys
import tempfile

from transformers import AutoTokenizer

TEXTS = ["list the files in data", "shell command cat ls notes txt other done move from to"]
SHELL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
MOVE = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {
    "from": {"type": "string"}, "to": {"type": "string"}}}}}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


MESSAGES = [{"role": "system", "content": "list"}, {"role": "user", "content": "list the files, in data/x1!"},
            {"role": "assistant", "content": "", "tool_calls": [call("shell", {"command": "ls data\n"}), call("move", {"from": "a", "to": "é"})]},
            {"role": "tool", "content": "notes.txt  \n\n"}, {"role": "assistant", "content": "done"}]
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.argv[1], folder, *TEXTS], check=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
print(json.dumps({"texts": TEXTS}))
for tools in (None, [SHELL], [SHELL, MOVE]):
    for messages, prompt in ((MESSAGES, True), (MESSAGES[:2], True), (MESSAGES, False)):
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        print(json.dumps({"messages": messages, "tools": tools, "add_generation_prompt": prompt, "text": text, "ids": ids}))
