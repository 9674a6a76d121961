"""Expressions whose values Jinja2 gives as goldens: see make.py. The variables are those of VARIABLES."""

VARIABLES = {
    "s": "Hello wide World",
    "n": 7,
    "f": 2.5,
    "xs": [3, 1, 2],
    "ws": ["b", "A", "c", "a"],
    "d": {"b": 2, "a": 1, "C": 3},
    "m": [
        {"role": "user", "content": "hi", "n": {"k": 2}},
        {"role": "assistant", "content": None, "n": {"k": 1}},
        {"role": "user", "content": "bye", "tags": ["x", "y"], "n": {"k": 3}},
    ],
    "nothing": None,
    "yes": True,
    "empty": [],
    "uni": "Straße ǅ É 你好 😀",
    "spaces": " \x1c\t a b \x1f\n",
    "lines": "a\nb\r\nc\rd\x0be\x0cf\x85g\u2028h\n",
}

EXPRESSIONS = r"""
nothing is iterable
missing is iterable
's' is iterable
n is iterable
d is iterable
d is sequence
s is sequence
xs is sequence
(1, 2) is sequence
missing is sequence
nothing is sequence
d is mapping
xs is mapping
yes is number
yes is integer
n is integer
f is float
n is float
1.0 is integer
s is string
nothing is none
missing is none
missing is defined
m[0].tool_calls is defined
m[0]['tool_calls'] is undefined
range is callable
s.upper is callable
s is callable
n is odd
n is even
9 is divisibleby 3
9 is divisibleby(4)
'ab' is lower
'AB' is upper
'' is lower
n is sameas n
xs is sameas [3, 1, 2]
1 is eq 1.0
'a' is in 'abc'
2 is in xs
yes is true
nothing is false
n is boolean
'upper' is filter
'odd' is test
n is gt 6
n is lessthan 3
missing | length
missing | count
missing | first
missing | last
missing | list
missing | join('x')
missing | upper
missing | trim
missing | string
missing | default('d')
missing | d(1)
'' | default('d')
'' | default('d', true)
nothing | default('d')
nothing | default('d', boolean=true)
missing ~ 'a'
missing == missing
missing == nothing
missing or 'x'
not missing
missing in xs
'a' in missing
missing.field
missing['field']
missing + 1
missing < 1
missing()
missing | int
m[0].missing.deeper
m[0].content.missing
nothing.x
nothing.x is defined
m[9] is defined
m[9]
m[-1].content
'%s' % s
'%s and %s' % ('a', n)
'%d|%5d|%-5d|%05d' % (n, n, n, n)
'%.2f|%8.3f|%+.1e|%g|%G' % (f, f, f, 1e-7, 1e20)
'%x|%X|%o|%#x|%c|%c' % (255, 255, 8, 255, 65, 'b')
'%r|%s|%s' % (s, none, true)
'%(a)s-%(b)03d' % d
'%%|%5s|%-5s|%.2s' % ('ab', 'ab', 'abc')
'%s' % xs
'%s %s' % (1,)
'%s' % (1, 2)
'%d' % 'a'
'%*d' % (5, 3)
'%s' | format(n)
'%s-%s' | format('a', 'b')
'%(x)s' | format(x=3)
'{} {}'.format('a', n)
'{1} {0}'.format('a', 'b')
'{x!r:>8}|{y:<6}|{y:^6}|{y:*>6}'.format(x='a', y='b')
'{:05.1f}|{:,}|{:x}|{:#b}|{:e}|{:%}'.format(f, 1234567, 255, 5, f, 0.25)
'{0[0]}{0[1]}|{1[role]}'.format(xs, m[0])
'{:>{w}}'.format('a', w=5)
'{}'.format()
'{{}}'.format(1)
s.rsplit(' ', 1)
s.rsplit(' ', 1)[-1]
s.rsplit()
s.split(' ', 1)
s.split()
'a,b,,c'.split(',')
'  a  b '.split(none, 1)
s.split('')
s.partition(' ')
s.partition('zz')
s.rpartition(' ')
s.rpartition('zz')
s.index('wide')
s.index('zz')
s.rindex('l')
s.find('l')
s.find('l', 4)
s.find('l', 4, 6)
s.rfind('l')
s.rfind('l', 0, 4)
s.find('zz')
s.startswith('wide', 6)
s.startswith(('x', 'Hell'))
s.startswith('wide', 6, 8)
s.endswith('World')
s.endswith('wide', 0, 10)
s.endswith(('d', 'x'))
s.count('l')
s.count('l', 4)
''.count('')
'42'.zfill(5)
'-42'.zfill(5)
'abc'.zfill(2)
'ab'.center(7)
'abc'.center(8)
'abc'.center(8, '*')
'ab'.ljust(5) ~ '|'
'ab'.rjust(5, '.')
'ab'.rjust(5, '..')
'Straße'.casefold()
uni.casefold()
uni.upper()
uni.lower()
'ß'.capitalize()
uni.swapcase()
uni | length
uni[::-1]
uni[1:4]
uni | upper
uni | capitalize
'hello wORLD it\'s'.title()
"they're bill's" | title
'foo-bar (baz) [q]' | title
s | lower
s | replace('l', 'L', 1)
s | replace('l', 'L')
s.replace('l', 'L', 2)
s.replace('', '-', 3)
'aaa' | replace('a', 'b', count=2)
5 | replace(5, 6)
spaces.strip()
spaces.lstrip()
spaces.rstrip()
spaces | trim
'xxaxx'.strip('x')
'xxaxx' | trim('x')
'abcba'.lstrip('ab')
lines.splitlines()
lines.splitlines(true)
''.splitlines()
'abc'.removeprefix('ab')
'abc'.removesuffix('bc')
'a\tb'.expandtabs(4)
','.join(ws)
','.join(xs)
'abc'.isalpha()
'ab1'.isalnum()
'12'.isdigit()
' \t'.isspace()
''.isspace()
'Ab Cd'.istitle()
'aB'.islower()
'AB1'.isupper()
'é'.isascii()
'a\n'.isprintable()
'abc' | int
'abc' | int(-1)
'12' | int
' 12 ' | int
'12.7' | int
'1_000' | int
'ff' | int(base=16)
'0x1F' | int(0, 16)
12.9 | int
yes | int
nothing | int
'3.5' | float
'x' | float
'x' | float(1.5)
'1e3' | float
n | float
-3 | abs
2.5 | round
3.5 | round
2.675 | round(2)
2.1 | round(method='ceil')
2.9 | round(0, 'floor')
n | round
1234.5 | round(-2)
d | dictsort
d | dictsort(true)
d | dictsort(by='value', reverse=true)
d | dictsort(false, 'value')
d | items | list
d.items() | list
d | list
d.keys() | list
d.values() | list
d.get('a')
d.get('z', 0)
d.get('z')
d['a']
d.a
'a' in d
d | length
dict(a=1, b=2)
dict([('x', 1)], y=2)
{'a': 1, 'a': 2}
{1: 'x', true: 'y'}
{'k': [1, 'two', none, {'z': 1.5}]}
d == {'a': 1, 'b': 2, 'C': 3}
'a b  c_d é' | wordcount
'' | wordcount
'a b/c?d=é&e' | urlencode
{'a': 1, 'b c': 'd/e'} | urlencode
[('a', 'x y')] | urlencode
'a\n b\n\nc' | indent
'a\nb' | indent(2, true)
'a\n\nb' | indent('> ', blank=true)
'hello wide world again' | truncate(12)
'hello wide world again' | truncate(12, true)
'hello wide' | truncate(9)
'hello wide world again' | truncate(12, false, '…', 0)
'ab' | center(6)
s | wordwrap(5) is defined
'<a href="x">&\'' | e
xs | sort
xs | sort(reverse=true)
ws | sort
ws | sort(case_sensitive=true)
m | sort(attribute='n.k') | map(attribute='n.k') | list
m | sort(attribute='role,n.k') | map(attribute='n.k') | list
[1, 'a'] | sort
xs | min
ws | max
ws | max(case_sensitive=true)
empty | min
empty | first
xs | sum
m | sum(attribute='n.k')
[[1], [2]] | sum(start=[])
xs | join('-')
xs | join
m | join(', ', attribute='role')
s | join('.')
xs | reverse | list
s | reverse
xs[::-1]
xs[1:]
xs[:-1]
xs[-2:]
xs[::2]
xs[5:]
(1, 2, 3)[1:]
xs | unique | list
ws | unique | list
ws | unique(true) | list
['a', 'A', 'b'] | unique | list
m | map(attribute='role') | unique | list
m | map(attribute='tags', default=[]) | list
m | map(attribute='n.k') | list
ws | map('upper') | list
xs | map('string') | map('length') | list
ws | map('replace', 'a', 'z') | list
m | selectattr('content') | map(attribute='content') | list
m | selectattr('role', 'equalto', 'user') | list | length
m | selectattr('tags', 'defined') | list | length
m | rejectattr('content', 'none') | map(attribute='role') | list
xs | select('odd') | list
xs | reject('gt', 2) | list
xs | select | list
[0, 1, '', 'a', none] | select | list
m | groupby('role') | map(attribute='grouper') | list
m | groupby('role') | map('last') | map('length') | list
xs | batch(2) | list
xs | batch(2, 0) | list
xs | slice(2) | list
[1, 2, 3, 4, 5] | slice(3, 'x') | list
m | attr('x')
s | first
s | last
d | first
xs | string
xs ~ ''
d ~ ''
(1,) ~ ''
() ~ ''
[none, true, 1.5, 'a\'b', "a\"'", '\n\t\\', 'é', '\x00', '\u200b'] ~ ''
m[0] ~ ''
range(3) ~ ''
range(1, 10, 3) | list
range(5, 0, -2) | list
range(0) | list
range(3)[1]
range(200000)
1e16
1e15
1.0
0.1
1e-5
0.0001
123456789012345678
1e22
-0.0
1 / 3
7 / 2
7 // 2
-7 // 2
-7 % 3
7 % -3
7.5 % 2
7.5 // 2
2 ** 10
2 ** -1
2 ** 0.5
1 / 0
1 % 0
1 + 2.0
true + 1
'a' * 3
3 * 'ab'
[1] * 2
[1] + [2]
(1,) + (2,)
'a' + 1
'a' + 'b'
1 ~ 2
-n
- s
+n
1 < 2 < 3
1 < 3 < 2
'a' < 'b'
'a' < 1
[1, 2] < [1, 3]
1 == 1.0
1 == true
'1' == 1
xs == [3, 1, 2]
(1, 2) == [1, 2]
1 in [1.0]
'z' not in s
1 in 'abc'
1 in n
n and 'x'
n or 'x'
0 or empty
not empty
'x' if yes else 'y'
'x' if missing
('x' if missing) is defined
1 if 0 else 2 if 0 else 3
n | string ~ 'a'
1_000
0x10
'a' 'b'
'é' | tojson
d | tojson
m | tojson(indent=2)
{'a': 1.0, 'b': [none, true]} | tojson(separators=(',', ':'))
'<&>\'"' | tojson
d | tojson(sort_keys=true)
missing | tojson
(1, 2) | tojson
1e16 | tojson
s.unknown()
s | unknown
n is unknown
n()
xs.append(1)
xs.append
d.update({})
xs.count(1)
xs.index(2)
xs.index(9)
[].__class__
s.__len__
cycler('a', 'b').next()
joiner(',')()
namespace(a=1).a
namespace(a=1).b is defined
xs | length > 2
m[0]['content'][0]
m[0].content[-1]
m[1].content
m | last | length
nothing | length
n | length
n | list
n | first
nothing | upper
nothing ~ 'a'
nothing | string
nothing + 'a'
yes | string
f | string
n.real
s is string and n is number
s is not string
n is not none and n > 3
missing is undefined or n
xs | tojson | length
[m[0].role, m[1].role] | join('/')
d | dictsort | map('first') | join
d.items() | map('join', '=') | join('&')
s[0] ~ s[-1]
s[100] is defined
s['upper']()
xs['append'] is defined
1.5.is_integer
'a.b'.split('.')[1]
loop is defined
self is defined
""".strip("\n").split("\n")
