"""Read a kernel's machine code as cuobjdump prints it: its loops, and an error that ptxas makes."""

import re


def instructions_of(code: str) -> dict[int, str]:
    """Instructions by address."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)
    return {int(address, 16): instruction for address, instruction in lines}


def loops_of(instructions: dict[int, str]) -> list[tuple[int, int]]:
    """First and last address of each loop."""
    targets = {address: re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text) for address, text in instructions.items()}
    return [
        (int(target.group(1), 16), address)
        for address, target in targets.items()
        if target and int(target.group(1), 16) < address
    ]


def longest_inner_loop(code: str) -> int:
    """Instructions of the longest loop that has none inside: what a warp of the attention runs for a tile."""
    instructions = instructions_of(code)
    loops = loops_of(instructions)
    inner = [
        (start, end)
        for start, end in loops
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in loops)
    ]
    return max((sum(start <= address <= end for address in instructions) for start, end in inner), default=0)


# They have a register for their first operand, and only read it.
READERS = r"(ST|RED|LDGSTS|BAR|BRA|ISETP|FSETP|PLOP|R2UR|WARP|DEPBAR|NOP)"


def overwritten_operands(code: str) -> int:
    """Registers that an asynchronous product reads in each turn of a loop, and that a turn writes only after that.

    The next turn's product is of something else than was meant: ptxas takes such registers for free where a branch
    follows the product.
    """
    instructions, found = instructions_of(code), set()
    for start, end in loops_of(instructions):
        body = {address: text for address, text in instructions.items() if start <= address <= end}
        first_written: dict[int, int] = {}
        for address, text in body.items():
            for register in written_by(text):
                first_written.setdefault(register, address)
        for address, text in body.items():
            if product := re.search(r"\bHGMMA\S* R\d+, R(\d+), gdesc", text):
                operand = range(int(product.group(1)), int(product.group(1)) + 4)
                found |= {(address, register) for register in operand if first_written.get(register, -1) > address}
    return len(found)


def without_predicate(instruction: str) -> str:
    """From its name on, without the condition that it may begin with."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction)


def written_by(instruction: str) -> range:
    """The registers that an instruction writes."""
    name, _, operands = without_predicate(instruction).partition(" ")
    first = re.match(r"\s*(?:!?U?P\w+,\s*)*R(\d+)\b", operands)
    if first is None or re.match(READERS, name):
        return range(0)
    product = re.match(r"HGMMA\.64x(\d+)x", name)
    wide = (
        4 if re.search(r"\.128|\.M(T)?88\.4", name) else 2 if re.search(r"^CS2R|\.64|\.WIDE|\.M(T)?88\.2", name) else 1
    )
    return range(int(first.group(1)), int(first.group(1)) + (int(product.group(1)) // 2 if product else wide))
