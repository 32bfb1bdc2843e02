"""Seeded text of many kinds for the tests with SmolLM2."""
import random

PROSE = """The ferry left the harbour a little after six, when the fog had begun to lift and the first gulls were out.
Nobody in the village could remember a winter as long as this one, and the ice on the lake had never been so thick.
Photosynthesis turns carbon dioxide and water into sugar and oxygen; the energy for it comes from the light on the leaves.
"I don't think we'll be there before noon," she said, "but you're welcome to start without us if the others can't wait."
In 1928 a Scottish physician noticed that a mould had killed the bacteria on one of his plates, and he wrote down what he saw.
To make the dough, mix the flour with a pinch of salt, add lukewarm water slowly, and knead it for ten minutes until it is smooth.
The committee (which meets every other Thursday) decided by seven votes to three that the bridge should be repaired.
A prime number has exactly two divisors. There are infinitely many of them, as Euclid showed more than two thousand years ago.
His grandfather's clock stood in the hall, its pendulum still; it had stopped, they said, on the night of the great storm.
Most of the world's fresh water is frozen, and much of what is left lies under the ground, where it moves only slowly.
She opened the letter with trembling hands, read the first line twice, and then sat down on the stairs without a word.
The train to the north was late again, so we drank another coffee and talked about the film we had seen the night before.
Gravity bends light: a star that stands behind the sun can be seen beside it during an eclipse, a little out of its place.
If the price rises, fewer people buy; if it falls, more do. How much more depends on what else they could have.""".split("\n")

SCRIPTS = ["Der schnelle braune Fuchs springt über den faulen Hund, während große Bäume im Wind ächzen.",
           "L'été dernier, nous avons déjeuné près de la forêt ; c'était déjà très agréable.",
           "El niño pequeño comió una manzana mientras su abuela leía el periódico de la mañana.",
           "Быстрая коричневая лиса перепрыгивает через ленивую собаку, а потом убегает в лес.",
           "Η γρήγορη αλεπού πηδάει πάνω από τον τεμπέλη σκύλο.", "今天的天气很好，我们一起去公园散步吧。图书馆在学校的旁边。",
           "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。", "오늘은 날씨가 아주 좋아서 친구들과 함께 공원에 갔습니다.",
           "ذهبت إلى السوق صباح اليوم واشتريت الخبز والفاكهة.", "הילדים שיחקו בחצר עד שירד הערב.",
           "मैं हर सुबह चाय पीता हूँ और अखबार पढ़ता हूँ।", "วันนี้อากาศดีมาก เราไปเดินเล่นกันเถอะ",
           "Tiếng Việt có nhiều dấu thanh và nguyên âm.", "აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ", "ქართული და Հայերեն"]

EMOJI = ["😀", "🎉", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇫🇷🇯🇵", "❤️", "☕", "🧑🏿‍🚀", "1️⃣", "🫠", "✅", "→", "★", "™", "½", "²"]

CODE = ['def add(a: int, b: int = 0) -> int:\n    """Sum of two numbers."""\n    return a + b\n\n',
        "for (size_t i = 0; i < rows.size(); ++i) {\n  if (!rows[i]) continue;\n  total += rows[i]->weight * 0.5f;\n}\n",
        "SELECT name, COUNT(*) AS n FROM orders WHERE total >= 99.95 GROUP BY name ORDER BY n DESC;\n",
        '{"id": 17, "tags": ["a", "b\\n"], "nested": {"x": null, "y": -1.5e-3}}\n',
        "#!/bin/sh\nset -eu\nfor f in *.txt; do\n\tgrep -n 'TODO' \"$f\" || true\ndone\n",
        "class Stack<T> {\n    private items: T[] = [];\n    push(x: T): void { this.items.push(x); }\n}\n",
        "<div class=\"card\"><p>Hello &amp; goodbye</p></div>\n",
        "fn main() {\n    let v: Vec<u32> = (1..=10).filter(|x| x % 2 == 0).collect();\n    println!(\"{:?}\", v);\n}\n",
        "import os, sys\n\nif __name__ == '__main__':\n        print(len(sys.argv), file=sys.stderr)\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```text\nend\n```\n"]

QUESTIONS = ["What is the capital of France?", "Write a short poem about the sea.",
             "Explain in two sentences why the sky is blue.", "How many legs does a spider have?",
             "Translate 'good morning' into Spanish.", "Give me three tips for learning to cook.",
             "Who wrote Romeo and Juliet?", "What is 17 + 25? Answer with the number only.",
             "Write a Python function that reverses a string.", "Name five animals that live in the desert.",
             "What does a compiler do?", "Summarise the story of Cinderella.", "Is water a good conductor of heat?",
             "How do I tie a bow tie?", "Tell me a joke about cats.", "List the planets of the solar system.",
             "What should I pack for a week in the mountains?", "Why do leaves change their colour in autumn?",
             "Convert 100 degrees Fahrenheit to Celsius.", "Write a polite e-mail that declines an invitation."]


def digits(rng):
    kind = rng.randrange(5)
    if kind == 0:
        a, b = rng.randrange(1000), rng.randrange(1000)
        return f"{a} + {b} = {a + b}\n"
    if kind == 1:
        return f"{rng.uniform(-1e4, 1e4):.{rng.randrange(1, 8)}f}, "
    if kind == 2:
        day = f"{rng.randrange(1900, 2030)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
        return f"{day}T{rng.randrange(24):02}:{rng.randrange(60):02}Z "
    return f"{rng.randrange(10 ** rng.randrange(1, 16)):,} " if kind == 3 else f"0x{rng.randrange(1 << 32):08x}\t"


def conversation(rng, turns):
    out = [{"role": "system", "content": rng.choice(PROSE)}] if rng.random() < 0.5 else []
    for turn in range(turns):
        out.append({"role": "user", "content": rng.choice(QUESTIONS)})
        if turn + 1 < turns:
            out.append({"role": "assistant", "content": " ".join(rng.sample(PROSE, rng.randrange(1, 4)))})
    return out


def text(kind, size, seed):
    """At least `size` characters of a kind: prose, code, digits, scripts, emoji, mixed."""
    rng = random.Random(f"{kind} {seed}")

    def piece():
        if kind == "prose":
            return rng.choice(PROSE) + rng.choice([" ", " ", " ", "\n\n"])
        if kind == "code":
            return rng.choice(CODE)
        if kind == "digits":
            return digits(rng)
        if kind == "scripts":
            return rng.choice(SCRIPTS) + rng.choice([" ", "\n"])
        if kind == "emoji":
            return rng.choice(EMOJI) + rng.choice(["", " ", " and then ", "! "])
        mixed = rng.choice([rng.choice(PROSE), rng.choice(CODE), digits(rng), rng.choice(SCRIPTS), rng.choice(EMOJI)])
        return mixed + rng.choice([" ", "\n", "  \n\n"])

    out = ""
    while len(out) < size:
        out += piece()
    return out
