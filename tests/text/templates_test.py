"""Chat templates: `temper text render` gives what Python's Jinja2 gives under the settings of transformers.

usage: templates_test.py TEMPER [SEED]. First the templates of real models in llama.cpp's source archive
(tests/setup_llama_cpp.py), each with hand-made and random conversations; those that the reference lists name with more of them. Then
random templates over the whole grammar: expressions, filters, tests, methods, statements and white-space control. Where Python fails, ours must fail too.
"""
import collections
import datetime
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import warnings

import jinja2

import door

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "golden" / "text"))
from transformers_jinja import environment

NAMED = """Bielik-11B-v3.0-Instruct CohereForAI-c4ai-command-r-plus-tool_use GLM-4.6 GigaChat3.1-10B-A1.8B
HuggingFaceTB-SmolLM3-3B MiMo-VL MiniMax-M2 NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Qwen-Qwen2.5-7B-Instruct
Qwen-Qwen3-0.6B Reka-Edge StepFun3.5-Flash deepseek-ai-DeepSeek-V3.1 google-gemma-2-2b-it
ibm-granite-granite-3.3-2B-Instruct meetkai-functionary-medium-v3.2 meta-llama-Llama-3.1-8B-Instruct
microsoft-Phi-3.5-mini-instruct mistralai-Mistral-Nemo-Instruct-2407 moonshotai-Kimi-K2 openai-gpt-oss-120b""".split()

ROUNDS = 2000  # random templates


PYTHON = environment(datetime.datetime.now)


def by_python(template, line):
    """The text, or None where Python fails."""
    try:
        return template.render(messages=line["messages"], tools=line.get("tools"), documents=line.get("documents"),
                               add_generation_prompt=line.get("add_generation_prompt", False), **line.get("variables", {}))
    except Exception as e:  # whatever a template may do wrong
        by_python.error = f"{type(e).__name__}: {e}"
        return None


# ---- conversations

def tool(name, properties, **more):
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.\nWell.", "parameters": {
        "type": "object", "properties": properties, "required": list(properties)[:1]}, **more}}


TOOLS = [tool("get_weather", {"city": {"type": "string", "description": "Where, e.g. \"Zürich\""}, "days": {
                  "type": "integer", "minimum": 1, "default": 3}, "unit": {"type": "string", "enum": ["C", "F"]}}),
         tool("run", {"command": {"type": ["string", "null"]}, "env": {"type": "object", "properties": {"A": {"type": "number",
                  "default": 1.0}}}, "list": {"type": "array", "items": {"type": "string"}}}, strict=True,
              ),
         tool("noop", {})]


# As Cohere's templates want them.
FLAT_TOOLS = [
    {"name": "search", "description": "Looks it up.", "parameter_definitions": {
        "query": {"description": "What.", "type": "str", "required": True},
        "most": {"description": "How many.", "type": "int", "required": False}}},
    {"name": "noop", "description": "Nothing.", "parameter_definitions": {}}]


def call(number, name, arguments, text=False):
    return {"id": f"call_{number:05d}", "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments) if text else arguments}}


def fixed():
    """(messages, tools) that every family must be able to see; what a template refuses it refuses in Python too."""
    user, again = {"role": "user", "content": "Hi ünï 你好 <b>&'\"\\\n"}, {"role": "user", "content": "  again  "}
    system = {"role": "system", "content": "Be  brief.\n"}
    said = {"role": "assistant", "content": "Sure."}
    thought = {"role": "assistant", "content": "<think>\nhm, {{ x }}\n</think>\n\nSure.", }
    reasoned = {"role": "assistant", "content": "Sure.", "reasoning_content": "first\nthen"}
    ids = [{"role": "tool", "tool_call_id": "call_00001", "name": "get_weather", "content": "{\"sun\": 1.0}"},
           {"role": "tool", "tool_call_id": "call_00002", "name": "run", "content": "a\nb\n"}]
    for text in (False, True):
        calls = [call(1, "get_weather", {"city": "Zürich", "days": 2, "unit": "C"}, text),
                 call(2, "run", {"command": None, "env": {"A": 1e-07, "b": True}, "list": ["x", "it's"]}, text)]
        one = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
        both = {"role": "assistant", "content": "Let me look.", "tool_calls": calls}
        none = {"role": "assistant", "content": None, "tool_calls": calls[:1], "reasoning_content": "weather?"}
        for tools in (None, TOOLS, TOOLS[:1]):
            yield [user, one, ids[0]], tools
            yield [system, user, both, *ids], tools
            yield [system, user, none, ids[0], said, again], tools
            yield [user, one, ids[0], {"role": "assistant", "content": "It is sunny."}], tools
    for tools in (None, TOOLS, FLAT_TOOLS):
        yield [user], tools
        yield [system, user], tools
        yield [system, user, said, again], tools
        yield [user, thought, again], tools
        yield [user, reasoned, again, reasoned], tools
        yield [user, said, again, thought, user], tools
        yield [{"role": "developer", "content": "Short."}, user], tools
        yield [{"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": " and two"}]}], tools
        yield [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}], tools
        picture = {"type": "image_url", "image_url": {"url": "data:x"}}
        yield [{"role": "user", "content": [picture, {"type": "text", "text": "?"}]}], tools
        yield [system], tools
        yield [user, user], tools
        yield [said], tools
        yield [], tools
        yield [{"role": "critic", "content": "no"}], tools
        yield [user, {"role": "assistant"}], tools


WORDS = ["Hi", "the", " ", "\n", "  \n", "<think>", "</think>", "<|im_end|>", "ünï", "你好", "👩‍👩‍👧", "{{ x }}",
         "{% if %}", "'", "\"", "\\", "&", "<", "\t", "0", "/no_think", "<tool_call>", "[INST]", "# x"]


def sometext(rng):
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(6)))


def value(rng, depth=0):
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 2:
        return sometext(rng)
    if kind < 6:
        return rng.choice([[0, -1, 7, 2**70], [1.0, 1e-07, 1e16, 0.1, -2.5], [True, False], [None]][kind - 2])
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice("abcdef"): value(rng, depth + 1) for _ in range(rng.randrange(3))}


def chat(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "system", "developer"]), "content": sometext(rng)})
    number = 1
    for _ in range(rng.randrange(4)):
        messages.append({"role": "user", "content": sometext(rng) if rng.random() < 0.8 else
                         [{"type": "text", "text": sometext(rng)} for _ in range(rng.randrange(1, 3))]})
        while rng.random() < 0.4:
            calls = []
            for i in range(rng.choice([1, 1, 2])):
                arguments = {rng.choice("abc"): value(rng) for _ in range(rng.randrange(3))}
                calls.append(call(number + i, rng.choice(["get_weather", "run", "noop"]), arguments, rng.random() < 0.3))
            message = {"role": "assistant", "content": rng.choice([None, "", sometext(rng)]), "tool_calls": calls}
            if rng.random() < 0.3:
                message["reasoning_content"] = sometext(rng)
            messages.append(message)
            for c in calls:
                name = c["function"]["name"]
                messages.append({"role": "tool", "tool_call_id": c["id"], "name": name, "content": sometext(rng)})
            number += len(calls)
        if rng.random() < 0.8:
            message = {"role": "assistant", "content": sometext(rng)}
            if rng.random() < 0.3:
                message["reasoning_content"] = sometext(rng)
            messages.append(message)
    return messages


def lines_of(rng, chats):
    flags = [{}, {"enable_thinking": False}, {"enable_thinking": True, "reasoning_effort": "high"}, {"thinking": True},
             {"builtin_tools": ["python"], "custom_tools": None, "model_identity": "A model."}, {"tools_in_user_message": False}]
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    pairs = list(fixed())
    for _ in range(chats):
        pairs.append((chat(rng), rng.choice([None, TOOLS, TOOLS[1:], FLAT_TOOLS, [tool("t", {"a": value(rng)})]])))
    for messages, tools in pairs:
        for prompt in (False, True):
            variables = {**special, **rng.choice(flags)}
            yield {"messages": messages, "tools": tools, "add_generation_prompt": prompt, "variables": variables}


# ---- random templates

VARIABLES = {
    "n": 7, "f": 2.5, "s": "Hello World", "u": "ÄÖß ŉ x", "l": [3, 1, 2], "w": ["b", "A", "a", "C"], "e": [], "z": None, "t": True,
    "d": {"b": 1, "A": "x", "items2": 5}, "rows": [{"k": "x", "v": 2}, {"k": "y", "v": 1}, {"k": "x", "v": 3}],
    "big": 123456789012345678901, "long": "one two  three\nfour\n\n five", "html": "<a href='x'>&\"",
    "nested": [[1, [2, "three"]], {"q": None}]}
CONSTANTS = ["missing", "1", "2.5", "'a b'", "\"x\\n\"", "true", "None", "[]", "{}", "()", "-3", "0", "[1, 'b']", "{'k': 'v', 'n': 1}",
             "(1, 2)", "1e3", "'é'"]
CALLS = ["range(3)|list", "range(5, 0, -2)|list", "dict(a=1)", "namespace(a=2).a", "cycler('a', 'b').next()", "joiner(',')()",
         "loop is defined", "caller is defined", "varargs is defined", "range(n)|sum", "range(4)", "range(9, 0, -4)",
         "d.items()", "d.keys()", "d.values()", "range(9)[2:7:2]", "range(5)[1]", "namespace(a=1, _b=2)", "dict(d, q=1)"]
LOOPS = [("x", "l"), ("x", "rows"), ("a, b", "d.items()"), ("x", "s"), ("x", "e"), ("x", "range(n)"), ("a, b", "[(1, 2), (3, 4)]"),
         ("x", "l|map('string')"), ("x", "w|unique"), ("x", "d"), ("k, g", "rows|groupby('k')"), ("x", "l|batch(2)"),
         ("x", "d.values()"), ("x", "rows|selectattr('v', 'gt', 1)"), ("x", "l|reverse")]
INSIDE_LOOPS = ["x", "a", "loop.index", "loop.first", "loop.last", "loop.index0", "loop.length", "loop.revindex", "loop.previtem",
                "loop.nextitem", "loop.cycle('p', 'q')", "loop.depth", "loop.revindex0", "loop.depth0"]
FILTERS = ["length", "count", "default('dd')", "d(1, true)", "trim", "trim('Hd')", "items|list", "dictsort",
           "dictsort(reverse=true)", "dictsort(by='value')", "string", "int", "int(5)", "float", "float(1.5)", "upper", "lower",
           "capitalize", "title", "replace('l', 'L')", "replace('o', '0', 1)", "join", "join(', ')", "join('-', attribute='k')",
           "list", "first", "last", "map('upper')|list", "map(attribute='k')|list", "map(attribute='v', default=9)|list",
           "select|list", "select('string')|list", "reject('none')|list", "selectattr('k')|list",
           "selectattr('k', 'equalto', 'x')|list", "rejectattr('v', 'gt', 1)|list", "selectattr('v', 'in', [1, 2])|list",
           "unique|list", "unique(attribute='k')|list", "sort", "sort(reverse=true)", "sort(case_sensitive=true)",
           "reverse|list", "reverse", "indent", "indent(2, true)", "indent(width=3, first=false, blank=true)", "abs", "round",
           "round(1)", "batch(2)|list", "batch(2, 'x')|list", "slice(2)|list", "slice(2, 'y')|list", "tojson",
           "tojson(indent=2)", "tojson(ensure_ascii=true)", "tojson(sort_keys=true)", "tojson(separators=(',', ':'))", "min",
           "max", "sum", "sum(start=10)", "sum(attribute='v')", "groupby('k')|list", "striptags", "wordcount", "wordwrap(5)",
           "center(20)", "truncate(5)", "truncate(5, true)", "truncate(7, false, '~', 0)", "xmlattr", "format(1)",
           "filesizeformat", "pprint", "attr('k')", "max(attribute='v')", "e", "safe", "forceescape", "e|e",
           "urlencode", "map('int')|first", "map('nope')|list", "map('abs')|first", "sort(attribute='nope')",
           "sort(attribute='k,v')", "round(-1)", "round(2, 'ceil')", "wordwrap(4, false, '|')",
           "wordwrap(6, true, none, false)", "xmlattr(false)", "filesizeformat(true)", "int(0, 16)", "replace('<', '>')",
           "format(2, 3)", "slice(3)|map('length')|list", "batch(2)|first", "unique|first", "groupby(0)", "tojson(indent=0)",
           "sum(start=[])", "d(none)", "nope"]
TESTS = ["defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "mapping", "iterable", "sequence",
         "callable", "true", "false", "odd", "even", "divisibleby(3)", "divisibleby 3", "eq(7)", "equalto(7)", "nope", "ne(7)", "gt(2)",
         "ge 7", "lt 3", "le(3)", "in(l)", "in [7, 2]", "lower", "upper", "sameas(z)", "sameas none", "escaped"]
METHODS = ["n % 3", "-n % 3", "2 ** n", "f ** 2", "'%s' % l", "'é' % l", "s.split()", "s.split('o')", "s.split('o', 1)",
           "s.rsplit('o', 1)", "s.strip('Hd')", "s.lstrip('H')", "s.rstrip()", "s.startswith('He')", "s.startswith(('x', 'H'))",
           "s.endswith('ld')", "s.upper()", "s.lower()", "s.title()", "s.capitalize()", "s.replace('l', '')", "s.find('o')",
           "s.rfind('o')", "s.index('W')", "s.count('l')", "s.isdigit()", "s.isalpha()", "s.join(w)", "','.join(w)",
           "long.splitlines()", "s.partition(' ')", "s.rpartition('o')", "s.zfill(15)", "s.ljust(13, '.')", "s.rjust(13)",
           "s.center(14, '*')", "s.swapcase()", "s.casefold()", "s.removeprefix('He')", "s.removesuffix('ld')", "s.isupper()",
           "s.islower()", "s.isspace()", "s.istitle()", "s.format()", "'{} {}'.format(n, s)", "'{0}-{x}'.format(n, x=f)",
           "'%s %d' % (s, n)", "s.expandtabs()", "d.items()|list", "d.keys()|list", "d.values()|list", "d.get('b')",
           "d.get('q', 4)", "l.index(1)", "l.count(3)", "rows[0].k", "rows[-1]['v']", "d.copy()", "l.append(4)", "d.update({})",
           "d.pop('b')", "l.sort()", "s.isalnum()", "s.isnumeric()", "u.lower()", "u.upper()", "s[0].isupper()",
           "u.casefold()", "u.title()", "u.swapcase()", "s.isascii()", "s.isidentifier()", "u.isprintable()",
           "s.translate({72: 'J', 111: none})", "''.maketrans('ab', 'xy')", "s.translate(s.maketrans('lo', '01', 'H'))",
           "s.count('l', 3, -1)", "s.find('l', -4)", "s.index('o', 5, 9)", "s.startswith('e', 1)",
           "'{:>8}|{:<5}|{:^7}'.format(s, n, f)", "'{:08.3f}|{:+,}|{:#x}|{:.1%}'.format(f, 1234567, n, f)",
           "'{0.b}|{1[k]}'.format(d, rows[0])", "'{x[0]!r:>5}'.format(x=w)", "'%(b)05d|%(A)-4s|' % d", "'%c%c' % (65, 'b')",
           "'%5.1f|%e|%G' % (f, f, f)", "'%*d|%-*.*f|' % (6, n, 8, 2, f)", "'%i %u %a' % (f, n, u)", "n.bit_length()",
           "f.is_integer()", "f.as_integer_ratio()", "big.bit_count()", "d.keys() == {'b': 1, 'A': 2}.keys()",
           "'b' in d.keys()", "('b', 1) in d.items()", "5 in range(3, 9, 2)", "range(3) == range(0, 3)", "l.index(1, 1)",
           "(1, 2, 1).count(1)", "{}.fromkeys('ab', 1)", "big + 1", "big * big", "big // 7", "big % 1000", "-big", "2 ** 70",
           "2 ** 70 // 3 ** 40", "big / 3", "big|float", "n ** 30", "'%d' % 1e20", "'%x' % big", "'{:,}'.format(big)",
           "big > 1e20", "big == big + 0.0", "[big, 1, 1e30]|sort", "('9' * 30)|int", "'٣٤'|int", "'1_000'|int", "('<'|e) + s",
           "s + ('<'|e)", "('%s<'|safe) % html", "('<{}>'|safe).format(html)", "('-'|e).join(['<', '>'|e])",
           "(html|e).upper()", "(html|e) is escaped", "[html|e]", "(html|e) ~ html", "html|e|e", "html|e|forceescape",
           "missing is callable", "(-3) ** n", "-2 ** n"]
OPERATORS = ["+", "-", "*", "/", "//", "~", "==", "!=", "<", ">", "<=", ">=", "and", "or", "in", "not in"]


def expression(rng, depth=0):
    kind = rng.randrange(14)
    if depth > 3 or kind < 3:
        return rng.choice([v for v in VARIABLES if v != "big"] + CONSTANTS)
    inner = lambda: expression(rng, depth + 1)
    if kind < 5:
        return f"{inner()}|{rng.choice(FILTERS)}"
    if kind == 5:
        return f"{inner()} is {rng.choice(['', 'not '])}{rng.choice(TESTS)}"
    if kind == 6:
        return rng.choice(METHODS)
    if kind < 9:
        return f"({inner()} {rng.choice(OPERATORS)} {inner()})"
    if kind == 9:
        return f"({inner()} if {inner()} else {inner()})" if rng.random() < 0.8 else f"({inner()} if {inner()})"
    if kind == 10:
        at = rng.choice(["0", "-1", "1:", ":2", "::-1", "1:3", "::2", "-2:", "'k'", "'b'", "99", "n", ":-1", "5:1:-1"])
        # What is no sequence cannot be sliced, but Jinja2 prints nothing where the whole is a constant.
        return f"({rng.choice(['s', 'l', 'w', 'rows', 'long', 'u', '(1, 2)', 's.split()', 'e']) if ':' in at else inner()})[{at}]"
    if kind == 11:
        return rng.choice([f"not {inner()}", f"-{inner()}", f"+{inner()}", f"({inner()}, {inner()})", f"[{inner()}, {inner()}]",
                           "{'a': " + inner() + "}"])
    if kind == 12:
        return f"({inner()}).{rng.choice(['k', 'b', 'v', 'x', 'upper()', 'split()', 'items()|list'])}"
    return rng.choice(CALLS)


def statements(rng, depth=0, inside_loop=False):
    out = ""
    for _ in range(rng.randrange(1, 4)):
        left, right = rng.choice(["", "", "-", "+"]), rng.choice(["", "", "-"])
        block = lambda text: "{%" + left + " " + text + " " + right + "%}"
        kind = rng.randrange(12)
        sub = lambda loop=inside_loop: statements(rng, depth + 1, loop) if depth < 2 else sometext(rng).replace("{", "(")
        if kind < 3 or depth >= 3:
            out += "{{" + rng.choice(["", "-"]) + " " + expression(rng) + " " + right + "}}"
        elif kind == 3:
            out += block(f"if {expression(rng)}") + sub()
            out += block(f"elif {expression(rng)}") + sub() if rng.random() < 0.4 else ""
            out += block("else") + sub() if rng.random() < 0.5 else ""
            out += block("endif")
        elif kind == 4:
            target, over = rng.choice(LOOPS)
            out += block(f"for {target} in {over}" + (f" if {expression(rng, 2)}" if rng.random() < 0.3 else ""))
            out += "{{ " + rng.choice(INSIDE_LOOPS) + " }}" + sub(True)
            out += block("else") + sub() if rng.random() < 0.3 else ""
            out += block("endfor")
        elif kind == 5:
            out += block(f"set {rng.choice(['x', 'y', 'x, y'])} = {expression(rng)}")
        elif kind == 6:
            out += block("set y") + sub() + block("endset") + "{{ y }}"
        elif kind == 7:
            out += block("set ns = namespace(v=1)") + block("for i in l")
            out += block(f"set ns.v = {rng.choice(['ns.v + i', 'ns.v ~ i', '[ns.v, i]'])}") + block("endfor") + "{{ ns.v }}"
        elif kind == 8:
            out += block("macro m(a, b=2)") + "{{ a }}-{{ b }}" + sub(False) + block("endmacro")
            out += "{{ " + rng.choice(["m(1)", "m(1, 3)", "m(b=4, a=s)", "m()", "m(1)|upper", "m(*l)", "m(**{'a': 1})", "m(1, 2, 3)",
                                       "m.name", "m.arguments", "m.catch_kwargs", "m.catch_varargs", "m.caller", "m",
                                       "m(1, q=2)"]) + " }}"
        elif kind == 9:
            out += rng.choice([
                block("filter upper") + sub() + block("endfilter"), block("generation") + sub() + block("endgeneration"),
                "{# a comment\n #}", "{#- c -#}\n", block("raw") + "{{ x }}{% if %}" + block("endraw"),
                block("with a = n") + "{{ a }}" + sub() + block("endwith"),
                block("macro c()") + "<{{ caller() }}>" + block("endmacro") + block("call c()") + sub(False) + block("endcall"),
                block("call(q) m2(1)") + "{{ q }}" + block("endcall"), block("autoescape false") + sub() + block("endautoescape"),
                block("autoescape true") + "{{ html }}" + sub(False) + "{{ [html]|join('<') ~ html }}" + block("endautoescape"),
                block(f"block b{rng.randrange(10**6)}{rng.choice(['', ' scoped'])}") + "{{ x }}" + sub(False) + block("endblock"),
                block("macro k(a)") + "{{ a }}{{ kwargs|length }}" + block("endmacro") + "{{ k(n, z=1) }}"
                + block("call k(1)") + sub(False) + block("endcall"),
                block("macro v()") + "{{ varargs }}{{ kwargs|length }}{{ caller(n) if caller }}" + block("endmacro")
                + block(rng.choice(["call(q) v(1, z=2)", "call v()", "call(q=3) v(*l, **d)"])) + "{{ q }}" + block("endcall"),
                block("set q") + sub(False) + block("endset") + "{{ q|length }}",
                block(f"if {expression(rng, 2)}") + "{{ s|nope }}" + block("endif"), "{{ s|nope if e else n }}",
                block("for x in nested recursive") + "{{ loop.depth }}"
                + "{{ loop(x) if x is iterable and x is not string and x is not mapping }}" + block("endfor")])
        elif kind == 10 and inside_loop:
            out += block(f"if {expression(rng, 2)}") + block(rng.choice(["break", "continue"])) + block("endif")
        else:
            out += rng.choice(["\n", "  ", "text\n", " \n ", "\t", "end\n\n", "é"]) + sometext(rng).replace("{", "(")
    return out


def unlike_text(text):
    """What carries an address or the order of a set is nobody's format."""
    signs = [" object at 0x", "<function", "<built-in", "<bound", "<generator", "<class", "<Macro"]
    return any(sign in text for sign in signs)


def render(program, folder, source, lines):
    path = pathlib.Path(folder) / "t.jinja"
    path.write_bytes(source.encode())
    answers, said, code = door.Door(program, path).run("render", "".join(json.dumps(line) + "\n" for line in lines))
    if code == 2 or len(answers) != len(lines):
        return None, said.strip()
    return [json.loads(a) for a in answers], said


def main():
    warnings.simplefilter("ignore", SyntaxWarning)  # of the code that Jinja2 makes
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 5)
    setup = pathlib.Path(__file__).resolve().parent.parent / "setup_llama_cpp.py"
    archive = pathlib.Path(subprocess.run([sys.executable, setup], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    failures, rendered, refused = [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        names = sorted(path.stem for path in (archive / "templates").glob("*.jinja"))
        for name in names:
            source = (archive / "templates" / (name + ".jinja")).read_text()
            template, lines = PYTHON.from_string(source), list(lines_of(rng, 40 if name in NAMED else 8))
            answers, said = render(sys.argv[1], folder, source, lines)
            if answers is None:
                failures.append(f"{name}: {said}")
                continue
            wrong, same = [], 0
            for line, ours in zip(lines, answers):
                theirs = by_python(template, line)
                if theirs is None:
                    refused += 1
                    if "error" not in ours:
                        wrong.append(f"{name}: Python fails ({by_python.error[:200]}), ours gives {ours['text'][-300:]!r} for "
                                     f"{json.dumps(line)[:600]}")
                    continue
                rendered += 1
                same += ours.get("text") == theirs
                if ours.get("text") != theirs:
                    said = ours.get("text", ours.get("error"))
                    wrong.append(f"{name}: {json.dumps(line)[:600]}\n    ours   {said!r}\n    Python {theirs!r}")
            failures += wrong[:3]
            if len(wrong) > 3:
                failures.append(f"{name}: and {len(wrong) - 3} more")
            if same < 30 and name in NAMED:
                failures.append(f"{name}: {same} conversations alike are too few to say anything ({by_python.error[:200]})")
        random_same = random_failed = 0
        unsupported = collections.Counter()
        line = {"messages": [], "variables": VARIABLES}
        for _ in range(ROUNDS):
            source = statements(rng)
            try:
                theirs = by_python(PYTHON.from_string(source), line)
            except jinja2.TemplateError as e:
                theirs, by_python.error = None, str(e)
            except SyntaxError:  # Python's own, of the code that Jinja2 made: `break` out of a block inside a loop
                continue
            if theirs is not None and unlike_text(theirs):
                continue
            answers, said = render(sys.argv[1], folder, source, [line])
            ours = None if answers is None else answers[0].get("text")
            why = said if answers is None else answers[0].get("error")
            if theirs is None:
                random_failed += 1
                if ours is not None:
                    failures.append(f"random: Python fails ({by_python.error[:200]}), ours gives {ours!r}\n    {source!r}")
            elif ours != theirs:
                if answers is None and "not supported" in said:
                    unsupported[said[said.index("line"):].split(": ", 1)[1].split(" is not")[0]] += 1
                    continue
                failures.append(f"random: {source!r}\n    ours   {ours if ours is not None else why!r}\n    Python {theirs!r}")
            else:
                random_same += 1
    print(f"measured: {len(names)} templates of real models, {rendered} conversations as Jinja2 has them, {refused} both refuse; "
          f"{random_same} random templates alike, {random_failed} that both refuse; not supported, and said so at load: "
          f"{', '.join(f'{k} ({v})' for k, v in unsupported.most_common(10)) or 'none'}")
    if random_same < ROUNDS // 4:
        failures.append(f"{random_same} random templates alike are too few to say anything")
    door.finish(failures)


if __name__ == "__main__":
    main()
