"""More expressions for make.py: slices, comparisons, methods, tests and operators of mixed values."""

VALUES = r"""
'a' < 1
1 < 'a'
none < 1
1 < none
[1] < (1,)
[1] < [1, 2]
[1, 'a'] < [1, 2]
(1, 2) < (1, 3)
{} < {}
d < d
none == 0
none == false
none == missing
missing == ''
missing != none
'' == none
[] == ()
{} == []
1 == '1'
1.0 == 1
true == 1
true == 'true'
[1, [2, {'a': none}]] == [1, [2, {'a': none}]]
{'a': 1, 'b': 2} == {'b': 2, 'a': 1}
'a' == 'a' == 'a'
1 < 2 == 2
1 == 1 in [1]
3 > 2 > 1
3 > 2 < 1
1 != 2 != 1
1 in [1] == true
'a' in 'abc' in ['abc']
not 1 in [2]
not 'a' == 'b'
1 not in [1] or 2
1 and 0 or 3
1 or 1 / 0
0 and 1 / 0
none and none.x
[] or {} or () or 'z'
'x' and missing
1 if missing else 2
(1 if false) is undefined
(1 if false) ~ 'x'
[1 if false, 2]
9007199254740993 == 9007199254740993.0
9007199254740992 == 9007199254740992.0
9007199254740993 > 9007199254740992.0
1e16 == 10000000000000000
2 ** 70 > 1e21
1 in '1'
'' in 'abc'
'' in ''
none in [none]
[1] in [[1]]
missing in [none]
1 in {'1': 2}
'1' in {1: 2}
1.0 in {1: 2}
{1: 'a'}[true]
{1: 'a'}[1.0]
{'1': 'a'}[1] is defined
{(1, 2): 'a'}[(1, 2)]
{none: 1}[none]
{[1]: 2}
{{}: 2}
{1: 1, 1.0: 2, true: 3}
[1] in d
{} in d
d[[1]] is defined
1 in missing
2 in range(5)
2.0 in range(5)
2.5 in range(5)
'a' in range(5)
5 in 5
'a' in none
'abc'[0]
'abc'[-1]
'abc'[5] is defined
'abc'[true]
'abc'['x'] is defined
'abc'[none] is defined
'abc'[1.0] is defined
xs[1.0] is defined
xs['0'] is defined
xs[true]
xs[-4] is defined
(1, 2)[-1]
d[0] is defined
nothing[0] is defined
5[0] is defined
'你好😀'[1:]
'你好😀'[::-1]
'abcdef'[4:1:-1]
'abcdef'[:1:-2]
'abcdef'[4::-2]
'abcdef'[-2:-5:-1]
'abcdef'[10:2:-3]
'abcdef'[-10:3]
'abcdef'[3:-10:-1]
'abcdef'[::-7]
'abcdef'[::100]
'abcdef'[2:2]
'abcdef'[5:2]
'abcdef'[none:3]
'abcdef'[1:none:2]
'abcdef'[::0]
s[f:]
s[s:]
'abcdef'[true:]
'abcdef'[99999999999999999999:]
'abcdef'[-99999999999999999999:2]
'abcdef'[::-99999999999999999999]
xs[::-1][0]
xs[-1:0:-1]
xs[:][0]
(1, 2, 3)[::-1]
xs[missing:]
m[1:][0].role
m[:-1] | length
m[::-1] | map(attribute='role') | list
missing[1:]
nothing[1:]
n[1:]
d[1:]
[] + []
[1] + (2,)
[1] + 'a'
'a' + none
none + 1
1 - 'a'
'a' - 'b'
'a' * 'b'
'a' * -1
'a' * 2.0
'a' * true
[1] * 0
2 * [1, 2]
(1,) * 3
none * 2
d + d
d * 2
'a' / 2
'a' // 2
1 % 'a'
none % 2
[1] % 2
[1] - [1]
2 ** 'a'
-'a'
-none
-[1]
missing * 2
-missing
missing // 1
1 ~ none ~ true ~ 1.0 ~ [1] ~ missing
[missing] ~ ''
{'a': missing} ~ ''
[missing] | tojson
'a' ~ 'b' * 2
1 + 2 ~ 3 + 4
1 ~ 2 + 3 ~ 4
2 * 3 ~ 4
-1 ~ -2
1 < 2 ~ 3
'ab' 'cd' ~ 'e'
'a' if true else 'b' ~ 'c'
[1, 2,]
(1, 2,)
{'a': 1,}
(1)
(1,)
()
[[], {}, ()]
{'a': {'b': [1, {'c': 2}]}}.a.b[1].c
{'items': 1}.items is callable
{'items': 1}['items']
{'keys': 5}.keys()
{'get': 1}.get('get')
{'a b': 1}['a b']
{'a': 1}.a
{'a': 1}.b
{'a': 1}.b.c
{'a': 1}['b']['c']
{'a': none}.a.b
'abc'.x
'abc'.x.y
5 .x is defined
xs.x is defined
xs[0].x is defined
true.x is defined
m[0].content.upper()
m[0]['content'].upper().lower().title()
m[0].get('content', '').strip()
m[0].content | upper | lower
'abc'.upper
'abc'.upper is callable
'abc'.nope is defined
'abc'['upper']() ~ 'abc'['nope']
'a-b-c'.split('-', 1)[1]
'a-b-c'.split('-', maxsplit=1)
'a-b-c'.split(sep='-')
'a-b-c'.rsplit('-', 1)
'a-b-c'.rsplit('-', maxsplit=1)
'a b'.split(' ', none)
'a  b'.split(' ')
''.split()
''.split('x')
'abc'.split('')
'abc'.split(5)
'a\x1cb\x85c\u2003d'.split()
'a b c'.split(none, 0)
' a b c '.split(none, 1)
' a b c '.rsplit(none, 1)
'a\nb'.splitlines(keepends=true)
'a\n\nb\n'.splitlines()
'a\r\n\rb'.splitlines(true)
'abc'.partition('')
'abc'.partition('b')
'abcb'.rpartition('b')
'abc'.partition('z')[1:]
'abc'.strip('')
'abc'.strip(none)
'abc'.strip('ca')
'abc'.strip(5)
' a '.strip(' ').strip()
'abcabc'.lstrip('ba')
'abcabc'.rstrip('bc')
'abc'.replace('b', '')
'abc'.replace('b')
'abc'.replace(5, 'a')
'abc'.replace('', '-')
''.replace('', 'x')
'aXbX'.replace('X', 'YY', 1)
'abc'.startswith('')
'abc'.startswith('', 3)
'abc'.startswith('', 4)
'abc'.startswith('b', 1)
'abc'.startswith('c', -1)
'abc'.startswith(['a'])
'abc'.startswith(5)
'abc'.startswith(('x', 'a'), 0, 1)
'abc'.startswith(())
'abc'.endswith('')
'abc'.endswith('b', 0, 2)
'abc'.endswith('bc', -2)
'abc'.endswith('', 4)
'abc'.endswith('c', none, none)
'abcabc'.find('c', 3)
'abcabc'.find('c', -3, -1)
'abcabc'.find('', 6)
'abcabc'.find('', 7)
'abcabc'.rfind('')
'abcabc'.rfind('abc', 0, 5)
'abcabc'.index('c', 3)
'abcabc'.index('x')
'abcabc'.rindex('a')
'abcabc'.count('bc')
'abcabc'.count('')
'abcabc'.count('', 3)
'abcabc'.count('', 7)
'aaa'.count('aa')
'你好你'.find('你', 1)
'你好你'.rfind('你')
'abc'.find(5)
'abc'.find()
'abc'.join(['x', 'y'])
', '.join([])
', '.join('abc')
', '.join({'a': 1, 'b': 2})
', '.join(5)
', '.join(none)
', '.join([1, 2])
', '.join(m | map(attribute='role'))
','.join(['a', none])
'abc'.center(2)
'abc'.center(6)
'abc'.center(6, '*')
'abcd'.center(7, '*')
'abc'.center(6, '')
'abc'.center('6')
'abc'.center()
'abc'.ljust(6, 'é')
'abc'.rjust(6) ~ '|'
'abc'.zfill(6)
'+3'.zfill(5)
'-'.zfill(3)
'--3'.zfill(5)
''.zfill(2)
'😀'.zfill(3)
'abc'.zfill(-1)
'a\tb\tc'.expandtabs()
'a\tb'.expandtabs(0)
'a\tb'.expandtabs(tabsize=2)
'a\nb\tc'.expandtabs(4)
'Hello'.swapcase()
'hello world'.capitalize()
'HELLO'.capitalize()
'hello'.upper().isupper()
'hello'.upper(1)
'hello'.upper(x=1)
'hello'.removeprefix('')
'hello'.removeprefix('hello')
'hello'.removesuffix('')
'hello'.removeprefix(5)
'hello'.removeprefix(prefix='h')
'hello'.title
'hello' is lower
'HELLO' is upper
'Hello' is lower
'123' is lower
'' is upper
5 is lower
none is upper
missing is lower
3 is odd
-3 is odd
3.0 is odd
3.5 is odd
'a' is odd
true is odd
4 is even
0 is even
none is even
6 is divisibleby 3
6 is divisibleby(0)
6.0 is divisibleby 2
6 is divisibleby('a')
6 is divisibleby
5 is number
true is number
'5' is number
none is number
missing is number
1.5 is float
1 is float
true is integer
false is boolean
0 is boolean
none is none
missing is none
'' is none
[] is iterable
5 is iterable
none is iterable
range(3) is iterable
range(3) is sequence
'a' is mapping
d is iterable and d is mapping
namespace() is mapping
namespace(a=1) is iterable
namespace(a=1) is sequence
d.get is callable
dict is callable
namespace is callable
cycler(1) is callable
joiner() is callable
5 is callable
missing is callable
xs is callable
'a' is escaped
1 is eq 1
1 is equalto(1.0)
1 is ne 2
1 is lt 2
1 is le 1
1 is ge 2
1 is greaterthan 0
1 is lessthan 'a'
1 is == 1
1 is in [1, 2]
1 is not in [1, 2]
1 is in 5
'a' is in('abc')
5 is sameas 5
1 is sameas 1.0
1 is sameas true
none is sameas none
'a' is sameas 'a'
d is sameas d
xs is sameas xs
missing is sameas missing
'trim' is filter
'nope' is filter
5 is filter
'even' is test
'nope' is test
1 is nope
1 is defined and 2 is defined
1 is not defined
missing is not defined
not missing is defined
missing is defined or 5
(missing | default(none)) is none
missing.a is defined
m[0].x is undefined
m[0].x.y is undefined
1 is odd == true
1 is true
true is true
false is false
none is false
1 is odd is true
missing | default
missing | default('x', true)
'' | d('x', true)
0 | default(5, true)
0 | default(5)
none | default(5)
none | default(5, boolean=true)
missing | default(default_value='x')
missing | default(1) + 1
(missing | default(1)) + 1
false | default(true)
false | default('x', true)
xs | join(5)
xs | join(none)
xs | join(d='-')
[none, true, 1.5] | join(',')
m | join(attribute='role')
m | join('|', 'n.k')
m | join('|', attribute='x')
'abc' | join('-')
d | join('-')
5 | join
['<', '>'] | join('&')
[[1], [2]] | join('-')
xs | length
d | count
range(5) | length
'你好' | length
'abc' | list
d | list
xs | list is sameas xs
range(3) | list
(1, 2) | list
'abc' | reverse
(1, 2) | reverse | list
d | reverse | list
xs | reverse
5 | reverse
xs | map('string') | list
xs | map('string')
xs | select
d | tojson
d | tojson(indent=1)
{'a': [1, {'b': 2}]} | tojson(indent=2)
{} | tojson(indent=2)
[[], {}] | tojson(indent=2)
[1, 2] | tojson(separators=(',', ':'))
{'a': 1} | tojson(indent=1, separators=(',', ' : '))
'é\u2028\x7f\x00/' | tojson
'é\u2028\x7f\x00/' | tojson(ensure_ascii=true)
1.0 | tojson
1e100 | tojson
(1e308 * 10) | tojson
{none: 1, true: 2, 1.5: 3} | tojson
{(1, 2): 3} | tojson
{'b': 1, 'a': 2} | tojson(sort_keys=true)
{1: 1, 'a': 2} | tojson(sort_keys=true)
range(3) | tojson
m | map(attribute='role') | tojson
m | map(attribute='role') | list | tojson
namespace() | tojson
2 ** 70 | tojson
-0.0 | tojson
'a' | tojson(5)
'a' | tojson(true)
'a' | tojson(x=1)
'abc' | attr('upper')
'abc' | attr('x') is defined
d | attr('a') is defined
(d | attr('items'))() | length
m[0] | attr('role')
xs | attr('append')
none | attr('x')
dict()
dict({'a': 1})
dict({'a': 1}, b=2)
dict([['a', 1]])
dict('ab')
dict(5)
dict(**{'a': 1})
namespace(a=1, b=2).b
namespace({'a': 1}).a
namespace([('a', 1)]).a
namespace(5)
namespace(a=1)
namespace(a=1)['a']
namespace(a=1)['b'] is defined
namespace(a=1).__class__
cycler('a', 'b').current
cycler('a').next() ~ cycler('a', 'b').reset()
cycler()
cycler('a')()
joiner()() ~ 'x'
joiner(sep='|')()
range(*[1, 4]) | list
dict(*[[('a', 1)]])
'{} {}'.format(*['a', 'b'])
'{a}'.format(**{'a': 5})
''.__class__
''['__class__'] is defined
d.__len__ is defined
xs.__class__.__mro__
'%s'.__mod__(1)
lipsum is defined
dict.fromkeys is defined
raise_exception is defined
strftime_now is callable
loop
self
caller is defined
varargs is defined
true == True
none == None
False or None
nullx is defined
True ~ None ~ False
1.real
'a'.__add__('b')
'a' is string is true
xs | length is gt 2
(xs | length) is gt 2
not xs is string
xs is not string and d is mapping
- 5 | abs
-5 | string
2 + 3 | string
(2 + 3) | string
1 in [1, 2] and 3 not in [1, 2]
[1, 2, 3][1:][0]
{'a': 1}['a']
'x' * 3 ~ 'y'
xs[0] + xs[-1] * 2
(xs | first) ~ (xs | last)
[x for x in xs]
lambda: 1
1 if 1
{1, 2}
1; 2
a.b.c
a!b
'a
1 +
+1
+ 1 - +1
~ 1
1 // 0
1 % 0
1.0 // 0
1.0 % 0
0 ** -1.5
'wide' in s and 'Wide' not in s
s | wordwrap(5)
(xs | random) is defined
1000 | filesizeformat
'<b>x</b>' | striptags
d | xmlattr
xs | pprint
'http://a.b' | urlize
xs | selectattr('x', 'defined') | list
xs | items
'a' | items
none | items
[] | items | list
(d | items)[0] is defined
d | items | list | first
xs | string | length
(1, 'a', none, 1.5, [1], {'a': 2}) | string
['\'', '"', '\'"', '\\', '\n', '\u200b', '\xad', '\U000e0001', 'é'] | string
{'a': 'b\nc'} | string
{1.5: true} | string
[range(3)] | string
[1e16, 1e-7, 1.0] | string
[namespace] | string | length > 0
""".strip("\n").split("\n")
