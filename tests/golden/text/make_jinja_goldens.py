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
strftime_now('%f|%z|%Z|%%f|%-d|%B %A|%j|%I %p|%y%%') ~ strftime_now('')
strftime_now()
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
d.items() ~ d.keys() ~ d.values() ~ {}.items()
range(3) ~ range(1, 9, 2) ~ range(10)[2:5] ~ range(10)[::-3] ~ range(5)[-1] ~ range(3)|length
[range(2), d.keys()]
'A' in d.keys() and ('b', 1) in d.items() and 5 in d.values() and 3 in range(1, 6, 2) and 2 not in range(1, 6, 2)
d.keys() == {'get': 1, 'A': 2, 'b': 3, 'items': 4}.keys() and range(0) == range(2, 1)
d.items()[0] is undefined
d.keys()|first ~ d.items()|last ~ range(4)|last
d.keys() is sequence or d.keys() is not iterable
range(3) is sequence and range(3) is iterable and range(3) is not callable
range(3)|tojson
d.items()|tojson
big + 1 ~ '|' ~ big * big ~ '|' ~ (big - big) ~ '|' ~ big // 1000 ~ '|' ~ -big // 1000 ~ '|' ~ big % 1000 ~ '|' ~ -big % 1000
2 ** 64 ~ '|' ~ 2 ** 200 // 3 ** 100 ~ '|' ~ 9223372036854775807 + 1 ~ '|' ~ -9223372036854775808 - 1 ~ '|' ~ 9223372036854775807 * 3
big / 3 ~ '|' ~ (2 ** 1000) / (2 ** 990 + 1) ~ '|' ~ 9007199254740993 / 1
big == 123456789012345678901.0 or big > 1e20 and 9007199254740993 != 9007199254740992.0 and 2 ** 53 == 9007199254740992.0
'%d|%d|%x|%X|%o' % (1e20, big, big, -big, 2 ** 70)
'{:,}|{:>30}|{:#x}|{:e}'.format(big, big, big, big)
[big, 1e30, -big, 7]|sort
[9007199254740993 == 9007199254740992.0, 9007199254740993 > 9007199254740992.0, 9007199254740992 == 9007199254740992.0, big == 123456789012345678901.0, big < 1e21, -big < -1e20, 0.5 < 1, big > 0.5]
'{:.3}|{:.3}|{:.1}|{:.4}|{:.2}'.format(100.0, 99.0, 1.0, 1234.5, 0.00001)
big|float ~ '99999999999999999999'|int + 1 ~ 1e25|int
0xffffffffffffffffffff
(2 ** 70).bit_length() ~ n.bit_length() ~ (255).bit_count() ~ f.is_integer() ~ (4.0).is_integer() ~ f.as_integer_ratio() ~ f.hex()
(0.1).as_integer_ratio() ~ n.real ~ n.imag ~ f.real ~ n.numerator ~ true.real
n.is_integer is defined
2 ** 20000
(-2) ** 2 ~ '|' ~ (-2) ** (n - 5) ~ '|' ~ -2 ** n
10.0 ** 400
0 ** -1
1e308 * 10
-7.5 // 2 ~ '|' ~ -7.5 % 2 ~ '|' ~ 7.5 // -2 ~ '|' ~ 0.0 * -1 ~ '|' ~ +(-0.0) ~ '|' ~ 5 % -3.0
'ΟΔΥΣΣΕΥΣ ΣΑΣ.'.lower() ~ 'Straße ﬁ ŉ'.casefold() ~ 'ΑΣ'|lower ~ 'ΑΣ ΒΣ'.title() ~ 'ΑΣΑΣ'.capitalize() ~ 'ǅ'.title()
'ªʰⅠⓐ'.islower() ~ 'ªʰ'.isupper() ~ 'Ⅷ'.isupper() ~ 'ǅ'.istitle() ~ '一二'.isnumeric() ~ '²'.isdigit() ~ '٣'.isdecimal() ~ 'é̂'|wordcount
'٣٤'|int ~ '１２'|int ~ ' ٣.٥ '|float ~ '1_000'|int ~ '1__0'|int(-1) ~ '_1'|int(-1) ~ '1_0.5'|float ~ '0x1F'|int(0, 16) ~ '0b11'|int(0, 0) ~ '010'|int(-1, 0)
'inf'|int ~ '1e400'|int(5) ~ 'nan'|int(6) ~ '1e3'|int
(1e308 * 10)|int
'ab_1é'.isidentifier() ~ '1a'.isidentifier() ~ 'aé'.isascii() ~ ''.isascii() ~ 'a\n'.isprintable() ~ ''.isprintable() ~ '\u200b'.isprintable()
'abc'.translate({97: 'A', 98: none, 99: 120}) ~ 'hello'.translate('x'.maketrans('el', 'ip', 'o')) ~ 'ab'.maketrans({'a': 'q', 98: 1})
'aaa'.find('a', 1) ~ 'aaa'.rfind('a', 0, -1) ~ 'aaa'.count('a', 1) ~ 'abc'.find('', 5) ~ 'abc'.count('', 4) ~ 'abc'.startswith('', 4) ~ 'abc'.find('c', -1) ~ 'abc'.index('b', none, 2)
'x'.replace(old='x', new='y')
'x'.center(none)
l.index(2, 1, 3) ~ l.index(1, -2) ~ (1, 2, 1).count(true)
'{:>6}|{:<6}|{:^6}|{:*^7}|{:06}|{:+}|{: }'.format('ab', 'cd', 'ef', 'x', -42, 7, 7)
'{:8.3f}|{:.0f}|{:e}|{:.3g}|{:g}|{:.1%}|{:,.2f}|{:_}'.format(f, f, 12345.678, 12345.678, 1e20, 0.1234, 1234567.891, 1234567)
'{:b}|{:o}|{:x}|{:X}|{:#b}|{:#X}|{:c}|{:5c}|{:08,}'.format(5, 8, 255, 255, 5, 255, 233, 65, 1234)
'{:.3}|{:10.2}|{!r:>6}|{!s}|{!a}'.format('abcdef', 'xyz', 'q', none, 'é')
'{:.3}|{:}|{:5}|{:.10}|{:#.3g}|{:.2}'.format(1234567.0, 1e16, 1.0, 0.1, 1.0, 100.0)
'{0.k}|{0[v]}|{1[0]}|{a.b}|{0[nope]}|{0.nope}'.format(rows[0], l, a=d)
'{:{}}|{:{w}.{p}f}'.format('a', 5, f, w=8, p=2)
'{} {0}'.format(1)
'{0} {}'.format(1)
'{} {}'.format(1)
'{x}'.format(y=1)
'{:d}'.format(2.5)
'{:,}'.format('a')
'{:5}'.format(none)
'{:q}'.format(1)
'{'.format()
'a}b'.format()
'{a}'.format_map({'a': 1})
'%(a)05.1f|%(b)-4d|%(a)s%%' % {'a': 2.25, 'b': 7}
'%c%c|%5c' % (65, 'é', 'x') ~ '%a' % 'é' ~ '%i|%u' % (3.9, true) ~ '%*d|%-*d|%.*f' % (5, 42, 5, 42, 1, 2.55)
'%5.1f|%-8.2e|%+g|%G|%#.0f|%05d|% d|%+d|%.3s|%08.3f' % (2.25, 12345.678, 1e-10, 1e-10, 3.0, -42, 5, 5, 'abcdef', -3.14159)
'%f' % (1e20 * 1e300)
'%x' % 2.5
'%d' % 'a'
'%d' % (1e308 * 10)
'%c' % 'ab'
'%s %s' % 'a'
'%s' % ('a', 'b')
'%q' % 1
'%' % ()
'%(a)s' % 5
html|e|e ~ html|e|forceescape ~ (html|e|string)|e
(html|e) + '<' ~ ('<' + (html|e)) ~ (html|e) ~ '<'
[html|e, '<'|safe]
(html|e) is escaped and '<'|safe is escaped and html is not escaped and (html|e|upper) is escaped and (html|e)|replace('a', 'b') is not escaped
('<b>%s</b>'|safe) % html ~ ('%s'|safe)|format('<') ~ ('<{}>'|safe).format('<') ~ ('<'|safe) * 2
(', '|safe).join(['<', '>'|e]) ~ ', '.join(['<'|e]) ~ ['<', '>'|e]|join('&') ~ ('a<b'|safe).split('<') ~ ('a<b'|e)[1:] ~ ('<'|safe).replace('<', '>')
5|safe ~ none|e ~ l|e ~ missing|e ~ '<i>'|safe|title ~ '<i> x'|safe|truncate(3, true, '<', 0) ~ '<a\n<b'|safe|indent(1)
missing is callable and range is callable and joiner() is callable and cycler(1) is not callable
rows|sort(attribute='nope')|length ~ rows|sort(attribute='v,k')|map(attribute='v')|list
rows|sort(attribute='k')
[3, 'a']|sort
[[1, 'b'], [1, 'a']]|sort(attribute=1) ~ [[2, 1], [1, 2]]|sort(attribute='0')
l|map('nofilter')|list
(l|map('nofilter')) is iterable
([1, 'x']|map('round'))|first
(['1', none]|map('upper'))|first
(l|select('nope')) is iterable and (l|selectattr('x', 'nope')) is defined
[1, 2, 'x']|select('odd')|first
[[], 1]|unique|list
['b', 'a', 'B', 1, 1.0, true, none, (1, 2), (1, 2)]|unique|list
l|batch(2)|first ~ l|slice(2)|first ~ [1, 2, 3]|batch(0)|list
l|slice(0)|list
(l|map('string'))|last
(l|map('string'))|length
(l|map('string'))[0] is undefined
l|map('string')|reverse|list ~ l|reverse|first ~ d|reverse|list
{(1, 2): 'a', none: 'b', 1.5: 'c', true: 'd'}[(1, 2)] ~ {1: 'a', true: 'b', 1.0: 'c'} ~ {0.1: 1, 0.10000000000000001: 2, 0.1000001: 3}|length
{[1]: 2}
d[[1]] is undefined
{(1, 2): 3}|tojson
{2: 'a', 10: 'b', 1: 'c'}|tojson(sort_keys=true)
{2: 'a', 'b': 1}|tojson(sort_keys=true)
{none: 1, true: 2, 1.5: 3}|tojson ~ (1, 2)|tojson ~ {'a': 1}|tojson(indent=0) ~ [1]|tojson(indent=true) ~ [f * 1e308 * 10]|tojson
long|wordwrap(7) ~ '|' ~ 'a well-known long-word-with hyphens'|wordwrap(9) ~ '|' ~ 'abcdefghijkl xy'|wordwrap(5, false) ~ '|' ~ 'x1-y2-z3 --q'|wordwrap(5) ~ '|' ~ 'a b c'|wordwrap(3, wrapstring='~')
'x'|wordwrap(0)
'<p>a &lt; b</p>\n  <!-- c <i> -->d &amp; e'|striptags ~ '&#65;&#x42;'|striptags ~ ('<b>x</b>'|safe).striptags()
{'class': 'a b', 'id': '<1>', 'no': none, 'un': missing, 'n': 5}|xmlattr ~ {'a': 1}|xmlattr(false) ~ {}|xmlattr
{'a b': 1}|xmlattr
1|filesizeformat ~ 999|filesizeformat ~ 1000|filesizeformat ~ 1234567|filesizeformat ~ 1234567|filesizeformat(true) ~ '5e9'|filesizeformat ~ -5|filesizeformat ~ 10 ** 30|filesizeformat
{'b': [1, 2], 'a': 'x'}|pprint ~ 'x'|pprint
{'long': ['a word ' * 8, 'b word ' * 8], 'b': {'n': 1}}|pprint
'some words ' * 10 |pprint
2.5|round(none) ~ 1250|round(-2) ~ 1350|round(-2) ~ big|round(-3) ~ 2.675|round(2) ~ -2.5|round ~ 1.23456e22|round(-20) ~ 0.5|round(0, 'ceil') ~ 17|round(-1, 'floor')
'1'|round
-1|abs ~ true|abs ~ -big|abs
'a'|sum
l|sum(start='')
[[1], [2]]|sum(start=[])
n|attr('real') ~ d|attr('get') is callable ~ d|attr('b') is undefined
namespace(_x=1) ~ namespace(_x=1)._x is defined
namespace(a=1)['a'] ~ cycler(1, 2).items ~ cycler(1, 2).pos ~ joiner('x').sep ~ joiner().used
true is sameas true and none is sameas none and l is sameas l and 1 is not sameas 1.0 and [] is not sameas []
'abc' is in 'xabcx' and 'random' is filter and 'nope' is not test
'x' if true else ('x'|nofilter)
('x'|nofilter) if false
'x'|nofilter
3 is nope if false else 'ok'
5[1:] ~ none[1:]
(5)[1:]
'tojson' is filter and l is eq([3, 1, 2])
{}.fromkeys('ab', 0) ~ dict([('a', 1)], b=2) ~ dict(missing)
{}.fromkeys('ab', 0) ~ dict([('a', 1)], b=2)
'a' ~ 'b' if false
d.copy() == d and d.copy() is not sameas d
'e' .upper()
l.append(4) is defined
loop is defined
lipsum is callable and debug is undefined
'%s' % 5 is odd
'a.b.c'|map('upper')|join('-')
'abc'|first ~ 'abc'|last ~ ''|first ~ {}|last
s|center(21) ~ '|' ~ s|center
'a\x0bb\x1cc\u2028d'.splitlines() ~ 'a\n\nb\n'.splitlines(true)
'it\'s "q" \\ \t\x00é\u00a0\U0001F600'|list
'a,b' .split(',', maxsplit=0) ~ ' a b '.split(none, -1) ~ 'a  b'.rsplit(' ') ~ ' a  b '.rsplit(none, 1)
{'a': 1}.get('a', default=2)
'abc'[1:2:0]
'abc'[::n] ~ 'abc'[-100:100] ~ l[5:] ~ l[-1::-1] ~ (1, 2, 3)[::2]
'abc'['x':] is defined
s['upper']() ~ d['keys']()|list|length
none.x is defined or none['x'] is defined
[1, [2, [3]]] == [1.0, [2, [3]]] and {'a': [1]} == {'a': [1]} and (1,) < (1, 2) and [1, 2] >= [1] and not ((1,) == [1])
l < 5
1 < n < 10 > 5 != 3
f in [2.5] and true in [1] and 'x' not in {'y': 1}
[l, e, s, 0, 0.0, '0', [0], {}, {'a': none}, big, 'false'|safe]|map('default', 'D', true)|list
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
    # Names that a frame assigns to before it reads them are unset from its beginning.
    "{% for i in [1] %}{{ s }}{% endfor %}{% set s = 1 %}{{ s }}",
    "{{ s }}{% for i in [1] %}{{ s }}{% endfor %}{% set s = 1 %}{{ s }}",
    "{% macro m() %}{{ s is defined }}{{ n is defined }}{% endmacro %}{{ m() }}{% if n %}{% set n = 1 %}{% endif %}{% set s = 2 %}{{ m() }}",
    "{% for i in l %}{% with %}{{ s is defined }}{% endwith %}{% set s = i %}{% for j in [1] %}{{ s }}{% endfor %}{% endfor %}{{ s }}",
    "{% if e %}{% set s = 1 %}{% endif %}{% for i in [1] %}{{ s }}{% endfor %}{% set s = 2 %}{% macro m() %}{{ s }}{% endmacro %}{{ m() }}",
    "{% set s %}{{ s is defined }}{% endset %}{{ s }}{% set n = n %}{{ n }}",
    "{% if e %}{% set s = 1 %}{% else %}{{ s }}{% endif %}{{ s }}{% filter replace('x', q) %}x{% set q = 'y' %}{% endfilter %}",
    # Macros: what they tell of themselves, what they take.
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ kwargs }}{{ varargs }}{% endmacro %}{{ m }}{{ m.name }}{{ m.arguments }}{{ m.catch_kwargs }}{{ m.catch_varargs }}{{ m.caller }}{{ m(1, 3, 4, z=5) }}",
    "{% macro m(a) %}{{ kwargs|length }}{% endmacro %}{% call m(1) %}x{% endcall %}{{ m(1, caller=2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{% call m(1) %}x{% endcall %}",
    "{% macro m(a) %}{{ a }}{{ caller }}|{{ caller.name }}{{ caller.arguments }}{% endmacro %}{% call(x, y=1) m(1) %}x{% endcall %}{{ m(2) }}",
    "{% macro m(caller) %}{{ caller }}{% endmacro %}{{ m(1) }}",
    "{% macro m(caller=5) %}{{ caller }}{% endmacro %}{{ m() }}{{ m(1) }}{{ m(caller=none) }}",
    "{% macro m(kwargs) %}{{ kwargs }}{% endmacro %}{{ m(1) }}{{ m(kwargs=2) }}",
    "{% macro m() %}{% set varargs = 1 %}{{ varargs }}{% endmacro %}{{ m() }}{{ m(2) }}",
    "{% macro m(a, b=a, c=b ~ a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m() }}",
    "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}",
    "{% macro m() %}{{ varargs|length }}{{ kwargs.q }}{% endmacro %}{{ m(*l, **{'q': 1}) }}{{ m(*l, q=2) }}",
    # Generators make their items when they are asked for.
    "{% set ns = namespace(x=1) %}{% set g = [ns]|map(attribute='x') %}{% set ns.x = 2 %}{{ g|list }}",
    "{% set g = l|map('string') %}{% for x in g %}{{ x }}{% break %}{% endfor %}{{ g|join(',') }}",
    "{% for x in l|map('string') %}{{ x }}{{ loop.last }}{{ loop.nextitem }}{% endfor %}{% for x in l|select %}{{ loop.length }}{% endfor %}",
    "{% set g = [1, 'x', 2]|map('round') %}{{ g|first }}{{ g is iterable }}",
    "{% set g = [1, 'x', 2]|map('round') %}{{ g|list }}",
    "{% for x in range(3) %}{{ loop }}{% endfor %}{% set r = range(4) %}{{ r }}{{ r|list }}{{ r|list }}",
    "{% for x in l %}{{ loop.changed(x > 1) }}{{ loop.cycle(*w) }}{{ loop is callable }}{{ loop|length }}{% endfor %}",
    # Blocks render where they stand, and see what is set outside of all other statements.
    "{% set a = 1 %}{% for i in [7] %}{% block one %}{{ a }}{{ i is defined }}{% set a = 2 %}{{ a }}{% endblock %}{% block two scoped %}{{ i }}{% endblock two %}{% endfor %}{{ a }}",
    "{% block a %}{% endblock %}{% block a %}{% endblock %}",
    # autoescape.
    "{% autoescape true %}{{ html }}{{ html|safe }}{{ '<' ~ html }}{{ ('<'|e) ~ n ~ html }}{% endautoescape %}{{ html }}",
    "{% autoescape true %}{% set x %}<i>{{ html }}{% endset %}{{ x }}{{ [x, '<']|join('<') }}{{ x|replace('<', '>') }}{% filter upper %}<{{ html }}{% endfilter %}{% endautoescape %}{{ x }}",
    "{% macro m(a) %}<{{ a }}>{% endmacro %}{% autoescape true %}{{ m('<') }}{{ m('<') is escaped }}{% macro k(a) %}<{{ a }}>{% endmacro %}{{ k('<') }}{% endautoescape %}{{ m('<') }}",
    "{% autoescape false %}{{ html }}{% endautoescape %}{% for x in l %}{% autoescape false %}{% if x == 1 %}{% break %}{% endif %}{% endautoescape %}{{ x }}{% endfor %}",
    # What Jinja2 does not know fails at load, but in a branch only where it is reached.
    "{% if e %}{{ s|nofilter }}{{ s is notest }}{% endif %}ok",
    "{% if n %}{{ s|nofilter }}{% endif %}",
    "{% if e %}{% for x in l %}{{ x|nofilter }}{% endfor %}{% endif %}",
    "{% if e %}{% for x in l|nofilter %}{% endfor %}{% endif %}ok",
    "{% if e %}{% set x %}{{ s|nofilter }}{% endset %}{% endif %}",
    "{% for x in [1] %}{% set loop = 1 %}{% endfor %}",
    "{% for loop in [1] %}{% endfor %}",
    "{% generation %}{{ varargs }}{{ kwargs }}{{ caller is defined }}{% endgeneration %}",
    "{% set ns = namespace(a=1) %}{% set ns.a, ns.b = 2, 3 %}{{ ns.a }}{{ ns.b }}{% set ns._c = 4 %}{{ ns._c is defined }}{{ ns }}",
    "{% set ns = namespace(a=1) %}{% set ns.a %}x{% endset %}{{ ns.a }}",
    "{% raw %}",
    "a{% raw %} ",
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
