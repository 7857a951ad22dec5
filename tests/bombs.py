"""Pickles that ask for much more than they hold, as programs: {name: bytes}. None of them is ever run by Python."""

import struct

MERSENNE = (1 << 61) - 1  # numbers that differ by a multiple of it have one hash


def long1(number):
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def vocabulary(program):
    """A pickle of {"idx2sym": [what the program leaves on the stack]}."""
    return b"\x80\x04}\x8c\x07idx2sym](" + program + b"es."


def doubled(begin, twice, depth):
    """Each container holds the one before it twice."""
    program = begin + b"\x94"
    for i in range(depth):
        program += twice(b"h" + bytes([i])) + b"\x94"
    return program


def programs(slow=False):
    """Yield (name, program); the slow ones take the machine to its limit of memory or of instructions."""
    numbers = b"](" + b"K\x01" * 200_000 + b"e"
    table = b"}(" + b"".join(b"J" + struct.pack("<i", 70_000 + i) + b"N" for i in range(20_000)) + b"u"
    key = b"(" + b"K\x01" * 60_000 + b"t\x94"
    collide = b"".join(long1(k * MERSENNE) + b"N" for k in range(1, 100_000))
    named = b"\x80\x04cdata_utils\nCorpus\n\x940" + table + b"\x940"
    keywords = b"\x80\x04}(" + b"".join(b"\x8c\x05" + b"%05d" % i + b"N" for i in range(9_000)) + b"u\x940"
    text = b"X" + struct.pack("<I", 2_000_000)
    equal = b"\x80\x04" + text + b"a" * 2_000_000 + b"\x94" + text + b"a" * 2_000_000 + b"\x94}h\x00Ns"
    lists = doubled(b"]K\x01a", lambda last: b"](" + last + last + b"e", 27)
    yield "billion laughs", vocabulary(lists)
    yield "billion tuples", vocabulary(doubled(b"K\x01\x85", lambda last: last + last + b"\x86", 27))
    yield "lists of one list", vocabulary(numbers + b"\x940" + b"cbuiltins\nlist\nh\x00\x85R0" * 2_000)
    yield "lists of one dict", vocabulary(table + b"\x940" + b"cbuiltins\nlist\nh\x00\x85R" * 2_000)
    yield "dicts of one dict", vocabulary(table + b"\x940" + b"ccollections\nOrderedDict\nh\x00\x85R" * 2_000)
    yield "a tuple as a key", b"\x80\x04" + key + b"0}" + b"h\x00Ns" * 40_000 + b"."
    yield "a tuple in a set", b"\x80\x04" + key + b"0\x8f(" + b"h\x00" * 40_000 + b"\x90."
    yield "one hash", b"\x80\x04}(" + collide + b"u."
    yield "one hash, Counter", b"\x80\x04ccollections\nCounter\n}(" + collide + b"u\x85R."
    yield "nested lists", vocabulary(b"]" * 200_000 + b"a" * 199_999)
    yield "nested stand-ins", vocabulary(b"cargparse\nNamespace\n" * 20_000 + b")R" + b"\x85R" * 19_999)
    yield "attributes again", named + b"h\x00)Rh\x01b" * 10_000 + b"."
    yield "keywords again", keywords + b"cdata_utils\nCorpus\n)h\x00\x92" * 8_000 + b"."
    if slow:
        yield "empty sets", b"\x80\x04(" + b"\x8f" * 6_000_000 + b"l."
        yield "empty dicts", b"\x80\x04(" + b"}" * 12_000_000 + b"l."
        yield "empty stand-ins", b"\x80\x04(cdata_utils\nCorpus\n\x94" + b"h\x00)R" * 2_000_000 + b"l."
        yield "instructions", b"\x80\x04" + b"N0" * 20_000_000 + b"N."
    yield "long keys", equal + b"h\x01Ns" * 1_000_000 + b"."
    yield (
        "texts four times as wide",
        b"\x80\x04X" + struct.pack("<I", 7 << 20) + b"a" * ((7 << 20) - 4) + "😀".encode() + b".",
    )
    yield "memo far away", b"\x80\x04N" + b"".join(b"r" + struct.pack("<I", k << 14) for k in range(200_000)) + b"."
    yield "a line without end", b"\x80\x02S'" + b"a" * 20_000_000
    yield "a long number", b"\x80\x02I" + b"9" * 1_000_000 + b"\n."


# No attribute is ever set and nothing is called. Python would change its own classes for all, or call `int`.
CHANGES = {
    "attributes of a class": b"ccollections\nCounter\nN}X\x06\x00\x00\x00updatec__builtin__\nint\ns\x86b0",
    "attributes of a dictionary": b"ccollections\nOrderedDict\n)R}X\x03\x00\x00\x00getc__builtin__\nint\nsb0",
    "attributes of attributes": b"ccollections\nOrderedDict\n)R(N}X\x09\x00\x00\x00__class__c__builtin__\nint\nstb0",
    "attributes of a stand-in": b"cargparse\nNamespace\n)R}X\x04\x00\x00\x00nameX\x02\x00\x00\x00ossb0",
}
CHANGES = {
    name: b"\x80\x02" + program + b"}X\x07\x00\x00\x00idx2sym]X\x01\x00\x00\x00aas."
    for name, program in CHANGES.items()
}
