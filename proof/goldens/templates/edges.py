"""More expressions for make.py: edges of formats, numbers, arguments that are none, and failures of generators."""

EDGES = r"""
'{:05}'.format('a')
'{:05}'.format('abcdefg')
'{:<05}|{:>05}|{:^05}'.format('a', 'b', 'c')
'{:*05}'.format('a')
'{:05s}'.format('é')
'{:=5}'.format('a')
'{:=05}'.format('a')
'{:0=5}'.format('a')
'{:5c}'.format(65)
'{:05c}|{:<5c}|{:^5c}|'.format(65, 66, 67)
'{:+c}'.format(65)
'{:,c}'.format(65)
'{:#c}'.format(65)
'%d' % 1e39
'%i' % -1e300
'%u' % 1e37
'%d' % 1e308
'%d' % -170141183460469231731687303715884105728.0
'%d' % (1e308 * 10)
'%5d|' % 123.9
1234567890123456789 | round(-1)
1234567890123456785 | round(-1)
-1234567890123456785 | round(-1)
1234567890123456775 | round(-1)
99999999999999999999999999999999999 | round(-34)
170141183460469231731687303715884105727 | round(-38)
170141183460469231731687303715884105727 | round(-37)
170141183460469231731687303715884105727 | round(-39)
-170141183460469231731687303715884105727 | round(-400)
50 | round(-2)
150 | round(-2)
-50 | round(-2)
51 | round(-2)
5 | round(-1)
7 | round(-1)
true | round(-1)
250.5 | round(-2)
350.0 | round(-2)
250.0 | round(-2)
-249.5 | round(-2)
-3.0 | round(-2)
1e22 | round(-21)
123456789.75 | round(-4)
1.5 | round(-400)
1.5 | round(400)
1.5 | round(400, 'ceil')
1.5 | round(309, 'floor')
1.5 | round(308, 'floor')
1.5 | round(-400, 'ceil')
1e308 | round(5, 'ceil')
(1e308 * 10) | round(0, 'ceil')
5 | round(400, 'ceil')
5 | round(none, 'ceil')
1.5 | round(none, 'floor')
5 | round(none)
0.1 | round(22, 'ceil')
'1_e5' | float
'1e_5' | float
'in_f' | float
'n_an' | float(3)
'1_0e1_0' | float
'1_.5' | float
'1._5' | float
'1_e5' | int(7)
(d | attr('items'))() | list
(d | attr('get'))('a')
(d | attr('get'))('zz', 9)
(d | attr('keys'))() | list
(d | attr('values'))() | list
(d | attr('copy'))() == d
(d | attr('zz')) is defined
(d | attr('a')) is defined
(d | attr('pop')) is defined
({'items': 1} | attr('items'))() | list
(s | attr('upper'))()
(xs | attr('index'))(2)
d | attr('a') ~ '|'
range == range
range != dict
dict == dict
range is sameas range
d.get == d.get
d.get == d.items
d.get == {'a': 1}.get
d.get is sameas d.get
range in [dict, range]
cycler == joiner
[1] | map('nope') is defined
[1] | map('nope') | list
[1] | map is defined
[1] | map(attribute='a', foo=1) is defined
[1, 'a'] | map('abs') | first
[1, 'a'] | map('abs') | list
5 | map('abs') is defined
5 | map('abs') | list
[] | map('nope') | list
[1] | select('nope') is defined
[1] | select('nope') | first
[1, 'a'] | select('gt', 0) | first
[1, 'a'] | reject('gt', 5) | list
5 | select is defined
[1] | selectattr is defined
5 | batch(2) is defined
5 | batch(2) | list
5 | slice(2) is defined
xs | slice(0) is defined
[1] | map('nope') | map('nope') is defined
[1] | map('nope') | select is defined
[1, 2] | batch(none) | list
[1, 2] | batch(none, 0) | list
[1, 2] | batch(none) is defined
[1, 2] | batch('a') | list
[1, 2] | batch('a', 0) | list
[1, 2, 3] | batch(2.0) | list
[1, 2, 3] | batch(2.0, 0) | list
[1, 2, 3] | batch(1.5) | list
[1, 2, 3] | batch(true) | list
[1, 2, 3] | batch(-1) | list
[1, 2, 3] | batch(-1, 0) | list
[1, 2] | slice(none) | list
[1, 2] | slice(none) is defined
'a' | center(none)
'a' | center('3')
'a\nb' | indent(none)
'a\nb' | indent(2.0)
'a\nb' | indent(true)
'hello wide world' | truncate(none)
'hello wide world' | truncate(5, leeway=none)
'aaa' | replace('a', 'b', none)
'12' | int(0, none)
1 ** 5000000000
1 ** 170141183460469231731687303715884105727
(-1) ** 5000000000
(-1) ** 5000000001
0 ** 5000000000
true ** 5000000000
0 ** 0
(-1) ** 0
range(0, 170141183460469231731687303715884105727, 85070591730234615865843651857942052864)[::1]
range(0, 85070591730234615865843651857942052865, 85070591730234615865843651857942052864)[::1]
range(0, 85070591730234615865843651857942052865, 85070591730234615865843651857942052864)[::-1]
range(0, 170141183460469231731687303715884105727, 85070591730234615865843651857942052864) | list
range(-1, -170141183460469231731687303715884105727, -170141183460469231731687303715884105727) | list
range(-170141183460469231731687303715884105727, 0, 170141183460469231731687303715884105727) | list
range(10)[2:8:3][::-1]
range(10)[::4]
range(10)[8:2:-2] | list
range(5)[5:]
range(5)[:-9:-1] | list
'abcdef'[::4]
'abcdef'[5:0:-2]
'abcdef'[-1:-9:-1]
'abcdef'[4:2]
(1, 2, 3)[::-1]
[1, 2, 3][::2]
[1, 2, 3][5:]
'--x--'.strip('-x')
'éxé' | trim('éx')
n is sameas 7
(n + 249) is sameas 256
(n + 250) is sameas 257
(n - 12) is sameas (0 - 5)
(n - 13) is sameas (0 - 6)
1000000 is sameas 1000000
(n + 250) is sameas 258
true is sameas n
() is sameas (())
(n, 2) is sameas ((n, 2))
(n, 2) is sameas ((n, 3))
(1, 2) is sameas ((1, 2))
'' is sameas ''
s[0] is sameas 'H'
uni[5] is sameas uni[4]
'é' is sameas uni[9]
uni[11] is sameas '你'
'ab' is sameas 'ab'
(s ~ '') is sameas s
(f + 0) is sameas f
range(n) is sameas range(7)
'abc'.maketrans('a', 'b')
'abc'.maketrans({'a': 'b'})
''.maketrans('ab', 'xy', 'cé')
''.maketrans({97: none, 'b': 'zz', 99: 120})
''.maketrans('ab', 'x')
''.maketrans({'ab': 1})
''.maketrans({none: 1})
''.maketrans('ab')
''.maketrans()
'abc'.translate({97: 'zz', 98: none, 99: 120})
'abcé'.translate(''.maketrans('ab', 'xy', 'cé'))
'abc'.translate({97: 1114112})
'abc'.translate({97: 1.5})
'abc'.translate({97: -1})
'ab'.translate('x' * 97 ~ 'yz')
'ab'.translate(['x'] * 98)
'ab'.translate(5)
'ab'.translate()
'{x} {y[0]} {x!r:>4}'.format_map({'x': 'a', 'y': [1]})
'{x}'.format_map({})
'{}'.format_map({'x': 1})
'{0}'.format_map({'0': 1})
'{x}'.format_map(5)
'{x}'.format_map()
dict.fromkeys('aba', 3)
dict.fromkeys([1, 'a'])
{}.fromkeys(xs, [])
dict.fromkeys([[1]])
dict.fromkeys(5)
dict.fromkeys()
dict.fromkeys is callable
dict.get is defined
""".strip("\n").split("\n")
