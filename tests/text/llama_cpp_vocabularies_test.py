"""llama.cpp's vocabulary files: `temper text encode` gives the ids that llama.cpp expects of its test inputs.

usage: llama_cpp_vocabularies_test.py TEMPER. A vocabulary of a kind that is not supported must be refused, naming the kind.
llama.cpp normalises nothing; where Hugging Face's tokenizer of the family composes characters (NFC), so does ours, and a text
that is not composed must give what its composed form gives.
"""
import pathlib
import subprocess
import sys
import unicodedata

import door

# What is not byte-pair encoding, or has a pre-tokenizer that llama.cpp only approximates.
REFUSED = {
    "bert-bge": "tokenizer.ggml.model 'bert' is not supported",
    "nomic-bert-moe": "tokenizer.ggml.model 't5' is not supported",
    "falcon": "tokenizer.ggml.pre 'falcon' is not supported",
}
SUPPORTED = {"command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2",
             "qwen35", "refact", "starcoder"}
COMPOSING = {"command-r", "mpt", "qwen2", "qwen35"}
SEPARATOR = "\n__ggml_vocab_test__\n"


def main():
    setup = pathlib.Path(__file__).resolve().parent.parent / "setup_llama_cpp.py"
    folder = pathlib.Path(subprocess.run([sys.executable, setup], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    failures, checked, refused, without = [], {}, [], []
    recomposed = 0
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        name = path.stem.removeprefix("ggml-vocab-")
        program = door.Door(sys.argv[1], path)
        lines, said, code = program.run("encode", '"a"\n')
        if name in REFUSED:
            refused.append(f"{name} ({REFUSED[name].split(' is')[0]})")
            if code != 2 or REFUSED[name] not in said:
                failures.append(f"{name}: exit code {code}, {said.strip()!r}; to be refused by {REFUSED[name]!r}")
            continue
        if code != 0:
            failures.append(f"{name}: {said.strip()}")
            continue
        inputs = path.with_name(path.name + ".inp")
        if not inputs.exists():
            without.append(name)
            continue
        texts = inputs.read_bytes().decode().split(SEPARATOR)
        expected = [[int(x) for x in line.split()] for line in path.with_name(path.name + ".out").read_text().splitlines()]
        texts = texts[:len(expected)]  # behind the last separator stands nothing
        if name in COMPOSING:
            composed = [unicodedata.normalize("NFC", t) for t in texts]
            changed = [i for i, t in enumerate(texts) if composed[i] != t]
            for i, ids in zip(changed, program.encode([composed[i] for i in changed])):
                expected[i] = ids
            recomposed += len(changed)
        wrong = [(t, ours, theirs) for t, ours, theirs in zip(texts, program.encode(texts), expected) if ours != theirs]
        failures += [f"{name}: {ascii(t)[:200]}\n    ours {ours}\n    llama.cpp {theirs}" for t, ours, theirs in wrong]
        if len(texts) != len(expected) or len(texts) < 40:
            failures.append(f"{name}: {len(texts)} inputs and {len(expected)} expected lines")
        checked[name] = len(texts)
    if set(checked) != SUPPORTED:
        failures.append(f"checked are {sorted(checked)}, to be checked were {sorted(SUPPORTED)}")
    print(f"measured: {sum(checked.values())} texts of {len(checked)} vocabularies ({', '.join(checked)}) as llama.cpp has them "
          f"({recomposed} of them as their composed form); refused: "
          f"{', '.join(refused)}; loaded, without test inputs: {', '.join(without)}")
    door.finish(failures)


if __name__ == "__main__":
    main()
