"""Writes jinja.cases.jsonl: templates, variables and what Python gives, under the settings of transformers.

Run with jinja2 3.1.6: python make_jinja_goldens.py > jinja.cases.jsonl. First lines define sets of
variables; then a case a line: template, name of its variables, and text, or failed: true (at load or when rendering).
"""
import json
import sys
from datetime import datetime

from transformers_jinja import environment

env = environment(lambda: datetime.fromtimestamp(1767323045))

MESSAGES = [
    {"role": "system", "content": "You are  helpful.\n"},
    {"role": "user", "content": "Hi ünï 你好 <b>&'\"\\"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": {"path": "/tmp", "n": 1, "f": 1.0, "deep": {"a": [1, None, True]}}}},
        {"id": "c2", "type": "function", "function": {"name": "cat", "arguments": {"path": "it's"}}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "a\nb\n"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "part one"}, {"type": "image_url"}]},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\ndone"},
    {"role": "user", "content": "again"}]
TOOLS = [{"type": "function", "function": {"name": "ls", "description": "lists", "parameters": {"type": "object", "properties": {
    "path": {"type": "string", "default": "."}, "n": {"type": "integer", "minimum": 1e-07, "maximum": 123456789012345678901234567890, "x": 1.0, "y": 1e16}},
    "required": ["path"]}}}]
CHAT = {"messages": MESSAGES, "tools": TOOLS, "documents": None, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
SMALL = {"messages": MESSAGES[:2], "tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>"}
V = {"messages": [], "tools": None, "n": 7, "f": 2.5, "s": "Hello World", "u": "ÄÖß ŉ ǆ İ x", "l": [3, 1, 2], "w": ["b", "A", "a", "C"], "e": [], "z": None, "t": True,
     "d": {"b": 1, "A": "x", "items": 5, "get": 6}, "rows": [{"k": "x", "v": 2}, {"k": "y", "v": 1}, {"k": "x", "v": 3}, {"v": 0}],
     "big": 123456789012345678901, "long": "one two  three\nfour\n\n five", "html": "<a href='x'>&\"", "nested": [[1, [2, "three"]], {"q": None}]}

EXPRESSIONS = r"""
1 + 2 * 3 - -4
7 // 2 ~ '|' ~ (-7) // 2 ~ '|' ~ -7 % 3 ~ '|' ~ 7 % -3
2 ** 3 ** 2
-2 ** 2
7 / 2
1 / 3
0.1 + 0.2
1e16
1e-5
1.5e300 * 1e10
5 // 0.3
-5.5 % 2
5.5 // 2
1_000 + 0x1f + 0b11 + 0o17
'a' 'b' "c"
'tab\tnl\nq\'x\\ \x41 \u00e9 \U0001F389 \q'
'%s-%d-%5.2f-%r' % ('x', 3, 2.5, 'q')
'%5s|%-5s|%05d|%x' % ('ab', 'cd', 42, 255)
'%(a)s' % {'a': 1}
s * 2 ~ 3 * 'ab'
[1, 2] + [3]
(1, 2) + (3,)
[1] * 3
(1,)
()
(1, 'a', none, true, 2.0)
[1, 'it\'s', "q\"", 'both\'"', none, {'a': (1,), 2: 'x'}]
{'a': 1, 'b': [1, 2]}
{1: 'x', 'y': {}}
'\n\t\x00\x7f\u200b\u00ad é 🎉'|list
nested
d
z
t
f
big
-big|abs
none
not t
n > 3 and 'yes'
n < 3 and 'yes'
e or 'empty'
z or e or 0 or 'x'
1 < 2 < 3
1 < 2 > 3
1 == 1.0 == true
'a' < 'b'
[1, 2] < [1, 3]
'é' > 'z'
1 in l
4 not in l
'World' in s
'A' in d
not 'A' in d
x is defined
n is defined and n is not none
missing
missing is undefined
missing|default('dd')
''|default('dd')
''|default('dd', true)
z|default('dd', boolean=true)
missing|d(1)
missing ~ 'x'
missing|length
missing|list
missing|upper
missing == missing
'a' if n > 3 else 'b'
'a' if n > 30
('a' if n > 30) is undefined
1 if false else 2 if false else 3
s[0]
s[-1]
s[99] is undefined
s[1:4] ~ s[::-1] ~ s[:-3] ~ s[-3:] ~ s[::2] ~ s[8:2:-2]
l[::-1]
l[1:]
l[-99:99]
u[::-1]
l.0
l[0]
d.b
d['b']
d['items']
d['get']
d.get('b')
d.get('nope')
d.get('nope', 3)
d.nope is defined
d.keys()|list
d.values()|list
d.items()|list
d|items|list
d|length
d|list
z.foo is defined
n.foo is defined
s.foo is defined
s.upper()
u.upper() ~ u.lower() ~ u.title() ~ u.capitalize() ~ u.swapcase()
u|upper ~ u|lower ~ u|title ~ u|capitalize
'they\'re bill\'s friends'.title()
'they\'re (bill\'s) x-friends'|title
'  x y '.strip() ~ '|' ~ '  x '.lstrip() ~ '|' ~ ' x  '.rstrip()
'xxabcxx'.strip('x') ~ 'abcba'.lstrip('ab') ~ 'abc\n\n'.rstrip('\n')
' \t\u00a0\u2003x\u200b '|trim
'xxabcxx'|trim('x')
'a,b,,c'.split(',')
'a,b,,c'.split(',', 1)
'  a  b c '.split()
'  a  b c  d '.split(none, 1)
'  a  b c  d '.rsplit(none, 1)
'a.b.c'.rsplit('.', 1)
'a</think>b</think>c'.split('</think>')[-1].lstrip('\n')
'abc'.startswith('ab') ~ 'abc'.startswith(('x', 'a')) ~ 'abc'.endswith('bc') ~ 'abc'.startswith('b', 1)
'aXbX'.replace('X', '--') ~ 'aXbX'.replace('X', '', 1) ~ 'ab'.replace('', '.')
'abcabc'.find('c') ~ 'abcabc'.rfind('c') ~ 'abcabc'.find('x') ~ 'abcabc'.index('b') ~ 'abcabc'.count('bc') ~ 'ééa'.find('a')
', '.join(['a', 'b'])
long.splitlines()
'a\r\nb\rc'.splitlines(true)
'12'.isdigit() ~ '1a'.isdigit() ~ ''.isdigit() ~ 'ab'.isalpha() ~ ' '.isspace() ~ 'a1'.isalnum() ~ 'AB'.isupper() ~ 'aB'.islower() ~ '½'.isnumeric() ~ '²'.isdigit() ~ '٣'.isdecimal()
'7'.zfill(3) ~ '-7'.zfill(4) ~ 'x'.ljust(3) ~ '|' ~ 'x'.rjust(3, '.') ~ 'x'.center(4, '*') ~ 'xy'.center(5, '*')
'a-b-c'.partition('-')
'a-b-c'.rpartition('-')
'abc'.partition('-')
'prefix_x'.removeprefix('prefix_') ~ 'x.jinja'.removesuffix('.jinja')
'{} and {}'.format(1, 'x') ~ '{0}{1}{0}'.format('a', 'b') ~ '{k}'.format(k=3) ~ '{{}}'.format()
'a\tb'.expandtabs(4)
l.index(1) ~ l.count(2)
l|sort
l|sort(reverse=true)
w|sort
w|sort(case_sensitive=true)
rows|sort(attribute='v')|map(attribute='v')|list
d|dictsort
{'b': 1, 'A': 2, 'c': 0}|dictsort(true)
{'b': 1, 'A': 2, 'c': 0}|dictsort(by='value')
w|unique|list
rows|map(attribute='k', default='?')|list
rows|map(attribute='k')|map('upper')|list
['a', 'b']|map('replace', 'a', 'c')|list
rows|selectattr('k', 'defined')|map(attribute='v')|list
rows|selectattr('k', 'equalto', 'x')|list|length
rows|rejectattr('k', 'eq', 'x')|list
rows|selectattr('v')|list|length
[0, 1, 2, 3]|select('odd')|list ~ [0, 1, none]|select|list ~ [0, 1, 2]|reject('==', 1)|list
[1, 2, 3, 4]|select('>', 2)|list
rows|groupby('v')|list
rows|groupby('k', default='?')|map('first')|list
l|sum ~ rows|sum(attribute='v') ~ l|max ~ l|min ~ w|max
e|max is undefined
l|first ~ l|last ~ s|first ~ s|last
e|first is undefined
l|join(', ') ~ w|join ~ rows|join('-', attribute='v')
l|reverse|list
s|reverse
[1, 2, 3, 4, 5]|batch(2)|list
[1, 2, 3, 4, 5]|batch(2, 'x')|list
[1, 2, 3, 4, 5]|slice(2)|list
[1, 2, 3, 4, 5]|slice(3, 'x')|list
'42'|int + '4.9'|int + 'x'|int(5) + ' 7 '|int + 3.99|int + '0x1f'|int(base=16) + true|int
none|int
'99999999999999999999'|int
'2.5'|float + 'x'|float(1.5) + 3|float + true|float
'inf'|float
2.5|round ~ 3.5|round ~ 2.675|round(2) ~ 2.1|round(0, 'ceil') ~ 2.9|round(method='floor') ~ 5|round ~ 1234.5|round(-2)
-3|abs ~ -2.5|abs ~ (-3)|abs
long|indent
long|indent(2, true)
long|indent(2, blank=true)
long|indent('> ')
'x'|indent
long|wordcount
'foo bar baz qux'|truncate(9) ~ 'foo bar baz qux'|truncate(9, true) ~ 'foo bar baz qux'|truncate(11) ~ 'foo bar baz qux'|truncate(11, false, '!', 0)
html|e
html|escape ~ html|safe
'a b/ü?'|urlencode
{'a': 1, 'b': 'x y'}|urlencode
'%s=%s'|format('a', 1)
'x'|center(5)
s|attr('upper') is callable
d|attr('b') is undefined
s|string ~ 5|string ~ l|string
s|length ~ u|length ~ d|count
l|tojson
d|tojson
nested|tojson(indent=2)
{'a': [], 'b': {}, 'c': 'é\n"\u2028'}|tojson
{'a': [1, 2], 'c': 'é🎉'}|tojson(ensure_ascii=true, separators=(',', ':'))
{'b': 1, 'a': {'d': 1, 'c': 2}}|tojson(sort_keys=true)
[1.0, 1e-07, 1e16, 123456789.123, -0.0, 1e22, 5e-324, 0.1, 100.0, 1e15, 12345678901234567.0]|tojson
big|tojson
none|tojson ~ true|tojson ~ 'a</b>&'|tojson
3 is odd
4 is even and 4 is divisibleby 2
4 is divisibleby(3)
3 is number and 3.0 is float and 3 is integer and true is boolean and true is number and true is not integer
s is string and l is sequence and d is mapping and l is iterable and d is iterable and s is iterable and 3 is not iterable
missing is sequence and missing is iterable and missing is not mapping
none is none and z is none
true is true and false is false and 1 is not true
'a' is in 'abc'
1 is in [1, 2]
3 is eq 3 and 3 is ne 4 and 3 is lt 4 and 3 is le 3 and 4 is gt 3 and 4 is ge 4 and 3 is equalto(3)
3 == 3 is true
'abc' is lower and 'ABC' is upper
'upper' is filter and 'nope' is not filter and 'even' is test
range is callable and s is not callable
none is sameas none
range(5)|list
range(2, 10, 3)|list
range(5, 0, -2)|list
range(3)|length
dict(a=1, b=2)
dict({'x': 1}, y=2)
namespace(a=1).a
namespace(a=1).b is defined
namespace({'q': 2}).q
cycler('a', 'b').next()
rows|map(attribute='v')|sum
(rows|selectattr('k', 'equalto', 'nope')) is defined
true if rows|selectattr('k', 'equalto', 'nope') else false
nested.0.1.1
rows[0].k ~ rows[0]['k'] ~ rows[-1].k|default('none')
1 ~ 2.0 ~ none ~ true
(n + 1)|string + 'x'
l|length > 2 and l[0] == 3
l == [3, 1, 2] and (1, 2) == (1, 2) and [1] != (1,)
{'a': 1} == {'a': 1.0}
{1: 2}[1.0]
{'a': 1}.a
''.join(['a', 'b'])|upper
missing.attr
missing['attr']
missing + 1
missing()
s()
'a' + 1
1 + none
1 < 'a'
'a' in 5
5|length
l.append(4)
d.update({'a': 1})
d.pop('b')
{}|dictsort(by='x')
l|tojson(foo=1)
1 // 0
''.nope()
'a'.split('')
raise_exception('boom ' ~ n)
missing|tojson
strftime_now('%Y-%m-%d %d %b %Y %H')
range(10) [2:4]|list
[1,2,3,][1]
{'a': 1,}['a']
{'a': {'b': 1}}.a.b
"{{ '}}' }}"
n if n is defined else m
x.y.z is defined
-'a'
+3
- 3 | abs
1 + 2|string|length
not n == 7
not not n
'a' ~ 'b' * 2
[l, w]|map('first')|list
[l, w]|map('join', '-')|list
l is not string and l is not mapping
'Ab Cd 1Ef'.istitle() ~ 'AB'.istitle() ~ 'a'.istitle() ~ ''.istitle()
0|select|list ~ false|map('upper')|list ~ z|selectattr('k')|list
7|select|list
n|indent
l|truncate(5) ~ rows|truncate(9)
n[1:]
d[1:]
'é' % l
missing|float
missing|int
'%x|%X|%o|%#x|%#X|%#o' % (-255, -255, -8, -255, 255, 8)
'%#8x|%-#8x|%#08x|%+x|% d|%05.2d|%.3d|%-+6d|' % (255, 255, -255, 255, 5, 3, -5, 7)
'%600d|%700.2f' % (5, 1.5)
'%s|%5s|' % (missing, missing) ~ '%s' % missing
rows|groupby('k', default='q')|map(attribute='grouper')|list
rows|groupby('k', default='q')|map(attribute='list')|map('length')|list
rows|groupby('k', default='q')|sort(attribute='grouper', reverse=true)|map('first')|list
(rows|groupby('v'))[0]['grouper']
[{'a': none}, {'a': [{'b': 1}]}]|map(attribute='a.0.b', default='-')|list
rows|map(attribute='k', default=none)|list
[{'a': none}, {'a': {'b': 1}}]|groupby('a.b', default=2)|map('first')|list
none|float ~ none|int
""".strip().split("\n")

BLOCKS = [
    "a\n  {% if true %}\n  b\n  {% endif %}\n  c\n",
    "a  {% if true %}  b  {% endif %}  c",
    "a\n  {%- if true -%}\n  b\n  {%- endif -%}\n  c\n\n",
    "a\n  {%+ if true +%}\n  b\n  {%+ endif %}\n  c",
    "a {{- ' x ' -}} b\n {{ 1 }}\n\n",
    "a\n  {# comment #}\n  b {# x -#}  \n c\n{#- y #}\nd",
    "  {% raw %} {{ x }} {% if %} {% endraw %}  \nx",
    "x\r\n  {% set a = 1 %}\r\n{{ a }}\r\n",
    "{% raw -%}  {{ a }}  {%- endraw %} b",
    "\n\n{% if t %}\nx\n{% endif %}\n\n",
    "{% set a = 1 %}\n{{ a }}",
    "   {% set a = 1 %}   {{ a }}   \n   {% set b = 2 %}   \n{{ b }}",
    "{{ '{% x %}' }}{{ \"#}\" }}",
    "{% for i in l %}{{ i }}{% endfor %}",
    "{% for i in l %}{{ loop.index }}/{{ loop.index0 }}/{{ loop.revindex }}/{{ loop.revindex0 }}/{{ loop.first }}/{{ loop.last }}/{{ loop.length }};{% endfor %}",
    "{% for i in l %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }} {{ loop.cycle('a', 'b') }} {{ loop.changed(i > 1) }};{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }},{% endfor %}",
    "{% for k, v in d|dictsort %}{{ k }}={{ v }},{% else %}none{% endfor %}",
    "{% for x in e %}x{% else %}empty{% endfor %}",
    "{% for x in missing %}x{% else %}empty{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.index }}:{{ x }} {{ loop.length }} {% endfor %}",
    "{% for x in l if x > 9 %}x{% else %}nothing{% endfor %}",
    # The condition is asked as late as it can be, so what it sees tells how far the loop has looked ahead.
    *("{% set ns = namespace(n=0) %}{% for x in range(9) if ns.n < 3 and x != 1 %}{% set ns.n = ns.n + 1 %}{{ x }}" + look + " {% endfor %}"
      for look in ("", "{{ loop.index }}{{ loop.first }}{{ loop.previtem }}", "{{ loop.last }}", "{{ loop.nextitem }}",
                   "{{ loop.length }}", "{{ loop.revindex }}", "{% if ns.n == 2 %}{{ loop.last }}{{ loop.nextitem }}{{ loop.revindex0 }}{% endif %}")),
    "{% set ns = namespace(on=true) %}{% for x in l if ns.on %}{{ x }}{% set ns.on = false %}{% else %}never{% endfor %}",
    "{% for x in l recursive %}{{ x }}{% endfor %}",
    "{% for x in nested recursive %}{{ loop.depth }}[{% if x is iterable and x is not string and x is not mapping %}{{ loop(x) }}{% else %}{{ x }}{% endif %}]{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}",
    "{% for c in s %}{{ c }}.{% endfor %}",
    "{% for i in range(3) %}{% for j in range(2) %}{{ loop.index }}{{ i }}{{ j }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}",
    "{% set ns = namespace(x=1, y=[]) %}{% for i in l %}{% set ns.x = ns.x + i %}{% set ns.y = ns.y + [i] %}{% endfor %}{{ ns.x }}{{ ns.y }}",
    "{% set x = 1 %}{% if t %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% if false %}{% set q = 2 %}{% endif %}{{ q is defined }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set (a, b) = (1, 2) %}{{ a + b }}",
    "{% set a = 1, 2 %}{{ a }}",
    "{% set x %}a{{ n }}b{% endset %}{{ x|upper }}",
    "{% set x | upper | replace('A', 'Z') %}abc{% endset %}{{ x }}",
    "{% set x.y = 1 %}",
    "{% set ns = namespace() %}{% set ns.a = 1 %}{{ ns.a }}{{ ns }}",
    "{% filter upper %}abc {{ s }}{% endfilter %}",
    "{% filter replace('a', 'b')|upper %}aaa{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}",
    "{% macro m(a, b=2, c='x') %}[{{ a }},{{ b }},{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(1, 2, 3) }}{{ m() }}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, q=4) }}",
    "{% macro m(x) %}{% if x > 0 %}{{ x }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(3) }}",
    "{% macro m() %}{{ n }}{{ z2 }}{% endmacro %}{% set z2 = 5 %}{{ m() }}",
    "{% set y = 1 %}{% macro m() %}{{ y }}{% set y = 9 %}{{ y }}{% endmacro %}{{ m() }}{{ y }}",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in {{ n }}{% endcall %}",
    "{% macro m() %}{% for i in l %}{{ caller(i) }};{% endfor %}{% endmacro %}{% call(x) m() %}item {{ x }}{% endcall %}",
    "{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}",
    "{%- macro outer(x) %}{%- macro inner(y) %}({{ y }}){% endmacro %}{{ inner(x) }}{% endmacro %}{{ outer(4) }}",
    "{% macro m(v) -%}\n  {{- v -}}\n{%- endmacro %}\n{{ m('a') ~ m('b') }}",
    "{{ m is defined }}{% macro m() %}{% endmacro %}{{ m is defined }}{{ m.name }}",
    "{% generation %}a{{ n }}{% set g = 1 %}{% endgeneration %}{{ g is defined }}",
    "{% set j = joiner('|') %}{% for i in l %}{{ j() }}{{ i }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{% set g = l|map('string') %}{{ g|join(',') }}{{ g|join(',') }}",
    "{% if l|select('equalto', 99) %}generator{% endif %}",
    "{% if e %}a{% elif z %}b{% elif n == 7 %}c{% else %}d{% endif %}",
    "{% if not e and (z is none or missing) %}ok{% endif %}",
    "{{ 'x' if t }}{{ ('y' if e) ~ 'z' }}",
    "{% set d2 = dict(d, extra=1) %}{{ d2.extra }}{{ d.extra is defined }}",
    "{% for m in rows %}{{- m.k if m.k is defined else '-' -}}{% endfor %}",
    "{% for x in l %}{% set last = loop.last %}{% if not last %}{{ x }},{% endif %}{% endfor %}",
    "{% for x in [1,2,3] %}{% set y = x %}{% for z in [1] %}{% set y = 'inner' %}{% endfor %}{{ y }}{% endfor %}",
    "{% print n, s %}",
    "{{ n }}{{ n",
    "{% if n %}",
    "{% endif %}",
    "{% for x l %}{% endfor %}",
    "{{ 1 + }}",
    "{{ (1 }}",
    "{{ 'abc }}",
    "{% unknown %}",
    "{{ x|nofilter }}",
    "{{ x is notest }}",
    "{# no end",
    "{% raw %} no end",
    "{{ }}",
    "{% set true = 1 %}",
    "{% break %}",
    "{{ a b }}",
    "{{ foo(a=1, 2) }}",
    "{% macro m(a=1, b) %}{% endmacro %}",
]

CHATS = [
    # ChatML with tools, think blocks and tool grouping, in the style of the Qwen family.
    """{% for x in [3, 1, 2] %}{% continue %}{% else %}none to its end{% endfor %}|{% for x in [3, 1, 2] %}{{ x }}{% break %}{% else %}broken{% endfor %}""",
    """{% for x in [3, 1, 2] %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% else %}no{% endfor %}""",
    """{% for x in [3, 1, 2] %}{{ x }}{% set y %}in{% break %}{% endset %}{{ y }}{% endfor %}|{% for x in [3, 1, 2] %}{% filter upper %}a{% if x == 1 %}{% continue %}{% endif %}b{% endfilter %}{% endfor %}""",
    """{% for x in [3, 1, 2] %}{{ x }}{% for a in [] %}{% else %}{% break %}{% endfor %}never{% endfor %}""",
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    # XML tool calls written by macros, parameters by kind.
    """{%- macro params(args) -%}
{%- for k, v in args.items() %}
<parameter name="{{ k }}">{{ v | tojson if v is not string else v }}</parameter>
{% endfor %}
{%- endmacro -%}
{%- macro schema(p, depth=0) -%}
{%- for name, spec in p.properties|items -%}
{{ '  ' * depth }}{{ name }}: {{ spec.type }}{% if spec.default is defined %} = {{ spec.default|tojson }}{% endif %}{{ '\\n' }}
{%- endfor -%}
{%- endmacro -%}
{{ bos_token }}{% for t in tools or [] %}{{ schema(t.function.parameters, 1) }}{% endfor %}
{%- for m in messages %}
[{{ m.role|upper }}]
{% if m.content is string %}{{ m.content|trim }}{% elif m.content is iterable and m.content is not none %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part['type'] }}>{% endif %}{% endfor %}{% endif %}
{% for c in m.tool_calls|default([]) %}<invoke name="{{ c.function.name }}">{{ params(c.function.arguments) }}</invoke>{% endfor %}
{% if m.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}""",
    # The alternation check of many templates.
    """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{{ '[' + message['role'] + ']' + message['content'] | trim }}{% endfor %}""",
    """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nDefault<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + (message['content'] or '')|string + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "{{ tools|tojson(indent=4) }}\n{{ messages[2].tool_calls|tojson }}",
]


names = {"V": V, "CHAT": CHAT, "SMALL": SMALL}
for name, value in names.items():
    print(json.dumps({"define": name, "value": value}))


def case(template, name):
    out = {"template": template, "with": name}
    try:
        out["text"] = env.from_string(template).render(**names[name])
    except Exception as e:  # noqa: BLE001: any failure is a failure
        out["failed"] = True
        print(type(e).__name__, str(e)[:90], "|", template[:60].replace("\n", "\\n"), file=sys.stderr)
    print(json.dumps(out))


for e in EXPRESSIONS:
    case("{{ " + e + " }}", "V")
for b in BLOCKS:
    case(b, "V")
for c in CHATS:
    case(c, "CHAT")
    case(c, "SMALL")
