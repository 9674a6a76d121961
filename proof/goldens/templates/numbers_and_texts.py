"""More expressions for make.py: literals, numbers and texts as Python has them, and filters with all their arguments."""

NUMBERS_AND_TEXTS = r"""
'\x41\x7e|\101\0|\u00e9|\U0001F600'
'\a\b\f\v\t' | tojson
'a\d\w\.\-'
'\\n\'\"' ~ "\'\""
'\é\😀'
'\N{BULLET}'
'\x4'
'\u12'
'\U00110000'
'\ud83d' | length
'\8\18\400'
'a\/b'
"it's" ~ 'say "hi"'
'Straße ﬁ İı ŉ ᾳ ǆ ẞ ΑΣ ꭰ'.casefold()
'Straße ﬁ İı ŉ ᾳ ǆ ẞ ΑΣ Σ ა'.upper()
'Straße ﬁ İı ŉ ᾳ ǆ ẞ ΑΣ Σ ა'.lower()
'straße ﬁ İı ŉn ᾳ ǆ ẞ ΑΣ Σ ა ﬄ'.title()
'straße ﬁ İı ŉn ᾳ ǆ ẞ ΑΣ Σ ა ﬄ' | title
'straße ﬁ İı ŉn ᾳ ǆ ẞ ΑΣ Σ ა ﬄ'.swapcase()
'ΑΣ'.capitalize()
'ǆ ΑΣ Σ'.capitalize()
'ﬁΑΣ' | capitalize
'ΑΣ. ΣΑΣ ΣΣ'.title()
'ΑΣ. ΣΑΣ ΣΣ' | lower
'ΑΣ. ΣΑΣ ΣΣ'.swapcase()
'a.b_c 3d' | title
'²'.isdigit()
'²'.isdecimal()
'²'.isnumeric()
'½'.isdigit()
'½'.isnumeric()
'三'.isnumeric()
'三'.isdigit()
'Ⅷ'.isnumeric()
'Ⅷ'.isalpha()
'①'.isdigit()
'①'.isalpha()
'٣৩๓𝟗'.isdecimal()
'٣৩๓𝟗'.isdigit()
'é́'.isalpha()
'हिन्दी'.isalpha()
'한国'.isalpha()
'a²½三'.isalnum()
'ªº'.isalpha()
'ǅ'.istitle()
'ǅ'.isupper()
'ǅ'.islower()
'Aǅ'.isupper()
'aǅ'.islower()
'ᾼa'.istitle()
"They'Re Big".istitle()
"They're Big".istitle()
'A1B'.istitle()
''.istitle()
''.isascii()
''.isprintable()
''.isalpha()
'\u00a0'.isspace()
'\u200b'.isspace()
'\u200b\u00ad'.isprintable()
'\u180e'.isspace()
'ªⓐ'.islower()
'ⒶⅧ'.isupper()
'abc'.isidentifier()
'abc'.encode()
'a'.translate({})
'{x}'.format_map({'x': 1})
'0x1f' | int(base=16)
'0x1f' | int(0, 16)
'0x1f' | int(0, 0)
'0b101' | int(base=0)
'0o17' | int(base=0)
'017' | int(base=0)
'000' | int(base=0)
'12' | int(0, 0)
'1f' | int(7, 0)
'0x1f' | int(base=10)
'0x1f' | int
'0b11' | int(base=16)
'0b11' | int(base=2)
'z' | int(base=36)
'1' | int(base=1)
'1' | int(base=37)
'1' | int(base=-2)
' -0x_1f ' | int(base=16)
'-ff' | int(base=16)
'0x' | int(3, 16)
'٣٤' | int
'٣.٥' | float
'１２' | int
'1__0' | int
'_1' | int
'1_0.5_0' | float
'1_' | float
'inf' | float
'-Infinity' | float
'nan' | float
'nan' | int(4)
'inf' | int(4)
'1e400' | int(4)
'infinit' | float(2)
'.5' | float
'5.' | float
'1e' | float(9)
'0x10' | float(9)
'+3' | int
'--3' | int(8)
'1e3' | int
'-2.7' | int
'9999999999999999999999' | int
true | float
[1] | int(5)
[1] | float(5)
12 | int(base=16)
none | float(3)
(0).bit_length
0 | int(0, 0)
'abc' | int(default='x')
-7 % 3.5
7 % -3.5
-0.0 % 3
0.0 % -3
-1 % 3.5
1e16 % 3
5.5 % -2
-5.5 // 2
5.5 // -2
-0.0 // 3
0.0 // -3
7.5 // -2.5
-7 // 2.0
1e308 * 10
-1e308 * 10
1e308 * 10 - 1e308 * 10
1e308 * 10 % 2
2.0 % (1e308 * 10)
-2.0 % (1e308 * 10)
(-8) ** 0.5
(-8) ** (1 / 3)
(-8.0) ** 2.0
(-8) ** 2.0
(-2) ** -2
(-2) ** 3
0 ** 0
0.0 ** -1
0 ** -1
10.0 ** 400
10 ** -400
2 ** 100
2 ** 126
2 ** 200
170141183460469231731687303715884105727 + 1
99999999999999999999999999999999999999999 + 1
9223372036854775807 + 1
9223372036854775807 * 9223372036854775807
-9223372036854775808 - 1
-170141183460469231731687303715884105728 // -1
18446744073709551616 // 3
18446744073709551616 % 7
18446744073709551616 / 3
9007199254740993 / 3
1 / 3.0
10 // 3.0
-2 ** 2
2 ** -1 ** 2
2 ** 3 ** 2
-2 ** -2
- -3
not not 1
true + true
true * 2.5
true // 2
true % 2
-true
7 // true
1e3
1E3
1.5e-7
1_000.5
0b101
0o17
0xFF
1_0_0
00
0.1 + 0.2
1e23
1.7976931348623157e308
5e-324
123456789.123456789
100000000000000000.0
1e15 + 0.5
0.00001
3.0 | int
1e20 | int
1e25 | int
1e300 | int
[1e308 * 10] | map('int', 3) | list
1.5 | string
5 | round
5.5 | round(0, 'common')
-2.5 | round
0.5 | round
1.25 | round(1)
2.675 | round(2, 'ceil')
-2.675 | round(2, 'floor')
1234 | round(-2)
1250 | round(-2)
1350 | round(-2)
1234 | round(-2, 'ceil')
5 | round(method='floor')
12345.678 | round(-2, 'floor')
0.1 | round(20)
1e22 | round(3)
1.5 | round(none)
'1.5' | round
true | round
2 | round(1, 'up')
-3.5 | abs
true | abs
'a' | abs
missing | abs
missing | round
d.items()
d.keys()
d.values()
{}.items()
d.items() ~ ''
d.keys() | list
d.keys() | length
d.values() | sum
d.items() | length
d.items() | first
d.keys() | join(',')
d.items() is sequence
d.items() is iterable
d.items() is mapping
d.keys()[0] is defined
'a' in d.keys()
2 in d.values()
('a', 1) in d.items()
d.keys() == d.keys()
d.values() == d.values()
d.keys() == ['b', 'a', 'C']
d.items() | string
d | items
d | items | string is string
[d.keys()]
d.keys() + ['x']
d.keys() | tojson
d.items() | dictsort
d.keys() | sort
d.values() | max
d.items() is sameas d.items()
d.keys() and 'x'
{}.keys() or 'x'
d.copy() == d
d.copy()
d.items()[0]
d.get()
d.get('a', 1, 2)
d.get(key='a')
d.pop('a')
d.fromkeys(['a'])
d.items(1)
xs.copy()
xs.index(1, 2)
xs.index(2, 1)
xs.index(2, 1, 2)
xs.sort()
(1, 2).index(2)
(1, 2, 1).count(1)
range(5).index(3)
range(5).count(7)
range(10)[2:8:3]
range(10)[::-1] | list
range(3) == range(0, 3, 1)
range(3) == [0, 1, 2]
range(0) == range(5, 5)
range(2, 9, 3).stop
range(10) | reverse | list
range('3')
range(1, 5, 0)
range()
range(2.0)
range(-3, 3) | sum
[] | sum
[1, 2.5] | sum
['a'] | sum
['a'] | sum(start='')
xs | sum(start=10)
xs | sum(start='')
[] | sum(start='')
[[1], [2]] | sum(start=[])
[(1,), (2,)] | sum(start=())
xs | sum(none, 1)
m | sum('n.k', 100)
m | sum(attribute='tags')
xs | min(attribute='x')
m | max(attribute='n.k')
m | min('n.k')
m | map(attribute='n') | map(attribute='k') | list
[] | max
[1, 'a'] | max
['b', 'B', 'a'] | min
['b', 'B', 'a'] | sort(false, false)
['b', 'B', 'a'] | sort(true, true)
['b', 'B', 'a'] | unique | list
[3, 1.0, true, 2] | sort
[1, 1.0, true] | unique | list
[none, 1] | sort
[[2, 1], [1, 2]] | sort
m | sort(attribute='content') | list
m | sort(attribute='zz') | map(attribute='n.k') | list
m | sort(reverse=true, attribute='n.k') | map(attribute='n.k') | list
m | groupby('role')
m | groupby('role') | list | length
m | groupby('n.k') | map(attribute='grouper') | list
m | groupby('tags', default='none') | map('first') | list
ws | groupby('0') | list
(m | groupby('role'))[0].list | length
(m | groupby('role'))[0] | string | length
d | dictsort(reverse=true)
d | dictsort(by='x')
d | dictsort(case_sensitive=true, reverse=true)
xs | dictsort
xs | batch(2, 'x') | list
xs | batch(5) | list
xs | batch(linecount=2, fill_with=none) | list
xs | batch(0) | list
[] | batch(3, 'x') | list
[] | slice(3) | list
[] | slice(2, 'x') | list
xs | slice(0) | list
xs | slice(5, 'x') | list
xs | slice(-1) | list
'abcd' | slice(2) | list
'abcd' | batch(3, '-') | list
xs | first
xs | last
xs | list | last
'' | first
'' | last
d | last
5 | last
xs | map('first') | list
ws | map('upper') | join
ws | map('default', 'x') | list
m | map(attribute='content', default='?') | list
m | map(attribute='n.z', default=0) | list
m | map(attribute='n.z') | list
m | map(attribute='role', foo=1) | list
xs | map | list
xs | map('nope') | list
xs | map(attribute=0) | list
[[1, 2], [3]] | map(attribute=0) | list
[[1, 2], [3]] | map('last') | list
[[1, 2], [3]] | map('join', '-') | list
[[1, 2], [3]] | map('sum') | list
m | map('attr', 'role') | list
m | map('items') | list | length
xs | select('gt', 1) | list
xs | select('nope') | list
xs | select('in', [1, 2]) | list
xs | select('divisibleby', 3) | list
ws | select('lower') | list
m | selectattr('n.k', 'gt', 1) | map(attribute='n.k') | list
m | selectattr('tags') | list | length
m | selectattr('n.k', 'in', [1, 3]) | list | length
m | rejectattr('tags') | list | length
m | rejectattr('role', 'eq', 'user') | list | length
m | selectattr | list
xs | reject | list
xs | reject('odd') | list
missing | select | list
nothing | select | list
missing | map('upper') | list
missing | sort
missing | reverse
missing | unique | list
missing | sum
missing | max
missing | dictsort
missing | items | list
missing | batch(2) | list
missing | replace('a', 'b')
missing | int(5)
missing | float
missing | title
missing | wordcount
missing | indent
missing | tojson
missing | urlencode
missing | center(5)
missing | groupby('a') | list
missing | length > 0
nothing | trim
nothing | title
nothing | list
nothing | join
nothing | first
nothing | tojson
nothing | replace('o', '0')
5 | upper
5 | trim
5 | replace('5', 6)
5 | length
5.5 | string | length
true | lower
true | string ~ '!'
'a,b' | replace(',', '\n')
'aaaa' | replace('a', 'b', 0)
'aaaa' | replace('a', 'b', -1)
'aaaa' | replace('', 'b', 2)
'aaaa' | replace('a')
'abc' | replace('b', none)
'  x ' | trim
'--x-' | trim('-')
'--x-' | trim(chars='-')
'  x ' | trim(none)
'x' | trim(5)
'abc' | center(width=9) ~ '|'
'abc' | center
'a\nb\nc' | indent(width=3)
'a\nb\nc' | indent(3, true, true)
'a\n\nc' | indent(2, blank=true)
'a\n' | indent
'\na' | indent(first=true)
'a\r\nb' | indent(1)
'' | indent(2, true)
'' | indent(2, true, true)
'hello wide world' | truncate(11)
'hello wide world' | truncate(11, leeway=0)
'hello wide world' | truncate(length=8, killwords=true, end='', leeway=0)
'hello wide world' | truncate(2)
'hello wide world' | truncate(3, leeway=0)
'hello' | truncate(2, true, '', 0)
'hello' | truncate(-1)
'a' | truncate(0, leeway=0)
'one two' | wordcount
'one-two_three 4' | wordcount
'é́a b' | wordcount
'a b&c' | urlencode
'ä/ö?x=1' | urlencode
{'q': 'a b', 'n': 1} | urlencode
[('a', none), ('b', true)] | urlencode
5 | urlencode
'<b>' | e
'<b>' | escape | length
'<b>' | safe
'<b>' | forceescape
5 | e
'<b>' | escape | escape
('<b>' | e) ~ '<i>'
'a%sb' | format('x')
'%s %s' | format('x')
'%s' | format('x', 'y')
'%(a)s' | format(a=1)
'%d%%' | format(50)
'%5.1f|%-8s|%+d' | format(2.25, 'ab', 3)
'%s' | format(a=1)
'%i %u' % (1.9, -2.9)
'%d' % 1e20
'%x' % -255
'%x' % 1.5
'%o %#o %#X' % (8, 8, 255)
'%e %E' % (12345.678, 0)
'%g %g %g' % (1e5, 1e6, 1e-5)
'%#g %.3g %.0f' % (1, 1234.5, 2.5)
'%c' % 128512
'%c' % 'ab'
'%5c|%-5c|' % ('a', 'b')
'%r %a' % ('é', 'é')
'%a' % 'aé😀'
'%.3r' % 'abcdef'
'%.*f' % (2, 3.14159)
'%*.*f' % (8, 2, 3.14159)
'%-*d|' % (5, 3)
'%+05d % d' % (3, 3)
'%05s|%05d|%-05d|' % ('a', 3, 3)
'%+.2e' % 0
'%s' % (none,)
'%s %s' % [1, 2]
'%s' % {'a': 1}
'%(a)s %(a)r' % {'a': 'x'}
'%(a)s' % {'b': 1}
'%(a)s' % 5
'%(a' % {'a': 1}
'%' % 1
'%z' % 1
'%s' % missing
'%d' % true
'%s' % 1.0
'%f' % 'a'
'%ld %hd' % (1, 2)
'%%' % ()
'abc' % 1
'abc' % []
'abc' % {}
'{:d}'.format(1.5)
'{:d}'.format('a')
'{:s}'.format(1)
'{:5}|{:<5}|{:^5}|{:>5}'.format(1, 1, 1, 1)
'{:5}|{:<5}|{:^5}|{:>5}'.format('a', 'a', 'a', 'a')
'{:5}|{:5}'.format(true, false)
'{}|{}|{}'.format(true, none, [1])
'{:5}'.format(none)
'{:>5}'.format([1])
'{!s:>6}|{!r}|{!a}'.format(none, 'é', 'é')
'{:,} {:_}'.format(1234567, 1234567)
'{:,.2f}'.format(1234567.891)
'{:_x} {:_b}'.format(1048575, 1023)
'{:010,}'.format(1234567)
'{:08.2f}|{:+.1f}|{: d}|{:-d}'.format(3.14159, 2, 5, 5)
'{:.3}|{:.3g}|{:g}|{:n}'.format(3.14159, 3.14159, 1e10, 12)
'{:.0f} {:.1%} {:%}'.format(2.5, 0.256, 1)
'{:x} {:X} {:o} {:b} {:c}'.format(255, 255, 8, 5, 97)
'{:#x} {:#o} {:#b} {:#010x}'.format(255, 8, 5, 255)
'{:e} {:E}'.format(12345.6789, 0.00012)
'{:*^9}|{:0>5}|{:0<5}|{:=+5}'.format('ab', 1, 1, 1)
'{0} {} {1}'.format(1, 2)
'{} {} {}'.format(1, 2)
'{a} {b}'.format(a=1)
'{a[k]} {a[0]}'.format(a={'k': 1, '0': 2})
'{0.role}'.format(m[0])
'{0[role]}'.format(m[0])
'{0[0]}{0[1]}'.format('ab')
'{0[-1]}'.format('ab')
'{:{}}|{:{}.{}f}'.format(1, 5, 2.5, 6, 1)
'{'.format()
'}'.format()
'{!x}'.format(1)
'{!}'.format(1)
'{:%Y}'.format(1)
'{:10.3}|'.format('abcdef')
'{:é^5}'.format('a')
'{:1.2d}'.format(1)
'{:,}'.format('a')
'{:.2f}'.format('a')
'{}'.format(missing)
'{:5}'.format(missing)
'{} {}'.format(1e16, 0.1)
'{:f}'.format(true)
'{0:}'.format(5)
'{:z}'.format(1)
n | truncate(5)
xs | truncate(9)
xs | truncate(3, leeway=0)
d | truncate
nothing | truncate
xs | truncate(2, true, '', 0)
missing | truncate
range(3) | urlencode
d.items() | urlencode
d.keys() | urlencode
m | unique | list
[[1], [1]] | unique | list
{d.keys(): 1}
d.items() in d
d.values() in d
'42' % namespace(a=1)
s is sameas s
s is sameas 'Hello'
(1, 2) is sameas (1, 3)
f is sameas 2
""".strip("\n").split("\n")
