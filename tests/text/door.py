"""The text doors of the program under test, for the tests in this folder: JSON lines in and out, one process for a batch."""
import json
import pathlib
import subprocess
import sys


class Door:
    """`TEMPER text WORD MODEL --in - OPTIONS…`"""

    def __init__(self, program, model):
        self.program, self.model = pathlib.Path(program).resolve(), model

    def run(self, word, text, *options):
        """(answers as text lines, what was said on standard error, exit code)"""
        run = subprocess.run([self.program, "text", word, self.model, "--in", "-", *options], input=text.encode(),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return run.stdout.splitlines(), run.stderr.decode(errors="replace"), run.returncode

    def encode(self, texts, *options):
        lines, said, code = self.run("encode", "".join(json.dumps(t) + "\n" for t in texts), *options)
        assert code == 0 and len(lines) == len(texts), f"temper text encode: {len(lines)} answers, exit code {code}: {said}"
        return [json.loads(line)["ids"] for line in lines]

    def decode(self, sequences, *options):
        lines, said, code = self.run("decode", "".join(json.dumps({"ids": ids}) + "\n" for ids in sequences), *options)
        assert code == 0 and len(lines) == len(sequences), f"temper text decode: {len(lines)} answers, exit code {code}: {said}"
        return [json.loads(line)["text"] for line in lines]


def finish(failures):
    """Says what failed and ends the script."""
    for text in failures:
        print(f"FAILED {text}")
    print(f"{len(failures)} failed" if failures else "all good")
    sys.exit(1 if failures else 0)
