"""Programs for the console, as bytes: what games do, at random, and single rules of the machine.

Those of 2 KB leave RAM 90-93 alone, where Boxing, under whose name they run, keeps the time and the score.
"""

from __future__ import annotations

import random

ORIGIN = 0xF800
VSYNC, VBLANK, WSYNC, COLUBK, HMOVE, CXCLR = 0x00, 0x01, 0x02, 0x09, 0x2A, 0x2C
NUSIZ0, COLUP0, COLUPF, CTRLPF, PF0 = 0x04, 0x06, 0x08, 0x0A, 0x0D
RESP0, RESP1, RESM0, GRP0, ENAM0, HMM0 = 0x10, 0x11, 0x12, 0x1B, 0x1D, 0x22
HMP0, RESMP0, HMCLR = 0x20, 0x28, 0x2B
INTIM, TIM1T, TIM64T = 0x284, 0x294, 0x296
REGISTERS = [r for r in range(0x04, 0x2D) if not 0x15 <= r <= 0x1A]  # without sync and sound
# Strobes and graphics matter most.
REGISTERS += [RESP0, RESP1, RESM0, 0x13, 0x14, GRP0, 0x1C, HMOVE, 0x0D, 0x0E, 0x0F] * 2
UNDOCUMENTED = [0x0B, 0x4B, 0x6B, 0xCB, 0x8B, 0xAB]
UNDOCUMENTED_RAM = [0x07, 0x27, 0x47, 0x67, 0x87, 0xA7, 0xC7, 0xE7]
ARITHMETIC = [0x69, 0xE9, 0x29, 0x49, 0x09, 0xC9]


class Program:
    def __init__(self):
        self.code = bytearray()

    @property
    def here(self) -> int:
        return ORIGIN + len(self.code)

    def add(self, *code: int) -> Program:
        self.code += bytes(code)
        return self

    def store(self, register: int, value: int) -> Program:
        return self.add(0xA9, value, 0x85, register)  # LDA #value; STA register

    def lines(self, count: int) -> Program:
        return self.add(0xA2, count, 0x85, WSYNC, 0xCA, 0xD0, 0xFB)  # LDX #count; STA WSYNC; DEX; BNE

    def wait(self, cycles: int) -> Program:
        """Any number of cycles but 1."""
        if cycles % 2:
            self.add(0x24, 0xFF)  # BIT $FF, 3 cycles
            cycles -= 3
        return self.add(*[0xEA] * (cycles // 2))

    def jump(self, address: int) -> Program:
        return self.add(0x4C, address & 0xFF, address >> 8)

    def call(self, address: int) -> Program:
        return self.add(0x20, address & 0xFF, address >> 8)

    def fold(self, cell: int) -> Program:
        """A into a cell of RAM so that nothing before it is lost: EOR cell; LSR; BCC; EOR #; STA cell."""
        return self.add(0x45, cell, 0x4A, 0x90, 2, 0x49, 0xB8, 0x85, cell)

    def start(self) -> Program:
        self.add(0x78, 0xD8, 0xA2, 0xFF, 0x9A)  # SEI; CLD; LDX #$FF; TXS
        return self.add(0xA9, 0, 0xA2, 0x2C, 0x95, 0, 0xCA, 0xD0, 0xFB)  # clear the TIA

    def new_frame(self) -> Program:
        return self.store(WSYNC, 2).store(VSYNC, 2).lines(3).store(VSYNC, 0)

    def build(self) -> bytes:
        assert len(self.code) <= 2042, len(self.code)
        vector = bytes([ORIGIN & 0xFF, ORIGIN >> 8])
        return bytes(self.code.ljust(2042, b"\xea")) + 3 * vector


def random_program(seed: int) -> bytes:
    """A frame of random TIA writes at random cycles, with reads and results folded into RAM."""
    draw = random.Random(seed)
    program = Program().start()
    frame = program.here
    program.new_frame().lines(draw.randrange(20, 34)).store(VBLANK, 0)
    ram = lambda: draw.randrange(0xA0, 0xC0)  # noqa: E731
    while len(program.code) < 1950:
        kind = draw.randrange(20)
        if kind < 8:
            program.store(draw.choice(REGISTERS), draw.randrange(256))
        elif kind < 11:
            program.add(0x85, WSYNC)
        elif kind < 13:
            program.wait(draw.randrange(2, 40))
        elif kind == 13:
            address = draw.randrange(0x30, 0x40)
            program.add(0xA5, address, 0x45, cell := ram(), 0x85, cell)  # LDA CX..; EOR cell; STA cell
        elif kind == 14:
            register = draw.choice([INTIM, INTIM + 1])
            program.add(0xAD, register & 0xFF, register >> 8, 0x65, cell := ram(), 0x85, cell)
        elif kind == 15:
            program.add(0xA9, draw.randrange(256), 0x8D, (TIM1T + draw.randrange(4)) & 0xFF, TIM1T >> 8)
        elif kind == 16:
            program.add(draw.choice([0xD8, 0xF8]), draw.choice(ARITHMETIC), draw.randrange(256), 0x85, ram(), 0xD8)
        elif kind == 17:
            program.add(draw.choice(UNDOCUMENTED), draw.randrange(256), 0x85, ram(), 0x08, 0x68, 0x85, ram())
        elif kind == 18:
            program.add(draw.choice(UNDOCUMENTED_RAM), ram(), 0x85, ram())
        else:
            high = draw.randrange(0xF8, 0x100)
            program.store(0xC0, draw.randrange(256)).store(0xC1, high)
            program.add(0xA0, draw.randrange(256), 0xB1, 0xC0, 0x85, ram())  # LDY #; LDA (C0),Y; STA
    program.store(VBLANK, 2).lines(draw.randrange(1, 30)).jump(frame)
    return program.build()


# The bytes of an instruction, by its opcode; and the opcodes that stop the processor.
LENGTHS = [2] * 256
for column in range(0, 0x100, 0x20):
    for opcode in (0x08, 0x0A, 0x18, 0x1A):
        LENGTHS[column + opcode] = 1
    for opcode in (0x0C, 0x0D, 0x0E, 0x0F, 0x19, 0x1B, 0x1C, 0x1D, 0x1E, 0x1F):
        LENGTHS[column + opcode] = 3
LENGTHS[0x00], LENGTHS[0x20], LENGTHS[0x40], LENGTHS[0x60] = 1, 3, 1, 1
JAMS = {0x02, 0x12, 0x22, 0x32, 0x42, 0x52, 0x62, 0x72, 0x92, 0xB2, 0xD2, 0xF2}
INSTRUCTION, REGISTERS_BEFORE, BACK = 0xA0, 0xA8, ORIGIN + 0x98


def instruction_program(banks: int = 0, has_ram: bool = False) -> bytes:
    """Runs the instruction at A0 in every frame, with SP, P, A, X, Y from A8 to AC; stores all of them, its cycles and
    two bytes of the cartridge at B0 to B7; counts at BA. It has to end with a jump to BACK, where BRK goes, too.

    `banks`: how many of 4 KB a cartridge has; each holds the program, and other bytes below it. 0: 2 KB. `has_ram`: so
    that ALE takes it for a cartridge with RAM, by the 256 equal bytes where that would be.
    """
    program = Program().start()
    for i, byte in enumerate((0x4C, BACK & 0xFF, BACK >> 8)):
        program.store(INSTRUCTION + i, byte)
    for i, byte in enumerate((0xFF, 0, 0, 0, 0)):
        program.store(REGISTERS_BEFORE + i, byte)
    frame = program.here
    program.new_frame().store(VBLANK, 0).add(0xA6, 0xA8, 0x9A).add(0xA9, 0xF0, 0x8D, TIM1T & 0xFF, TIM1T >> 8)
    program.add(0xA5, 0xA9, 0x48, 0xA5, 0xAA, 0xA6, 0xAB, 0xA4, 0xAC, 0x28).jump(INSTRUCTION)  # …; PLP
    assert program.here <= BACK
    program.add(*[0xEA] * (BACK - program.here))
    program.add(0x08, 0x85, 0xB0, 0x86, 0xB1, 0x84, 0xB2, 0x68, 0x85, 0xB3, 0xBA, 0x86, 0xB4, 0xD8, 0xAD, 0x84, 0x02)
    program.add(0x85, 0xB5, 0xAD, 0x00, 0xF4, 0x85, 0xB6, 0xAD, 0x80, 0xF0, 0x85, 0xB7, 0xE6, 0xBA)
    program.add(0xA2, 0xFF, 0x9A)
    half = program.store(VBLANK, 2).lines(10).jump(frame).build()
    half = half[:-2] + bytes([BACK & 0xFF, BACK >> 8])
    draw = random.Random(banks)
    low = lambda: draw.randbytes(1) * 256 + draw.randbytes(1792) if has_ram else draw.randbytes(2048)  # noqa: E731
    return b"".join(low() + half for _ in range(banks)) or half


def random_instruction(draw: random.Random, opcode: int) -> tuple[list[int], list[int]]:
    """An instruction with the jump behind it, and SP, P, A, X, Y before it."""
    code = [opcode]
    if LENGTHS[opcode] == 2:
        is_branch = opcode & 0x1F == 0x10
        code.append(
            draw.choice([0, 3]) if is_branch else draw.choice([draw.randrange(256), draw.randrange(0x80, 0x100)])
        )
    elif LENGTHS[opcode] == 3:
        segment = draw.choice([0xF, 0x1, 0x3, 0xD]) << 12
        address = draw.choice([
            draw.randrange(0x80, 0x100), draw.randrange(0x180, 0x200), draw.randrange(0x280, 0x2A0),
            draw.randrange(0x40), ORIGIN + draw.randrange(0x800), segment + draw.randrange(0xFE0, 0x1000),
            segment + draw.randrange(0x100), draw.randrange(0x10000),
        ])  # fmt: skip
        address = {0x4C: BACK, 0x20: BACK, 0x6C: draw.choice([0xB8, 0x1B8])}.get(opcode, address)
        code += [address & 0xFF, address >> 8]
    code += [0x4C, BACK & 0xFF, BACK >> 8] * (2 if len(code) == 2 else 1)  # a branch of 3 goes to the second
    stack = draw.randrange(0xC8, 0x100) if draw.random() < 0.8 else draw.randrange(0x7C)
    registers = [stack, *(draw.randrange(256) for _ in range(4))]
    if draw.random() < 0.7:
        registers[1] &= ~0x08  # binary
    return code, registers


def waiting_program(seed: int) -> bytes:
    """A frame of loops that wait for X, Y or the timer, entered anywhere; the picture shows when each of them ended."""
    draw = random.Random(seed)
    program = Program().start()
    frame = program.here
    program.new_frame().store(VBLANK, 0)
    for _ in range(36):
        branch = draw.choice([0xD0, 0xD0, 0x10])  # BNE, BPL
        timer = draw.randrange(branch == 0xD0, 3)  # TIM1T's 0 could be missed for many lines
        value = draw.randrange(*[(0, 256), (4, 40), (1, 6)][timer])
        program.add(0xA9, value, 0x8D, (TIM1T & 0xFF) + timer, TIM1T >> 8).wait(draw.randrange(2, 9))
        x, y, a = (draw.choice([0, 1, 2, draw.randrange(60), draw.randrange(256)]) for _ in range(3))
        program.add(0xA2, x, 0xA0, y, 0xA9, a)  # LDX #x; LDY #y; LDA #a
        loop = draw.choice([[0xCA], [0x88], *([load, INTIM & 0xFF, INTIM >> 8] for load in (0xAD, 0xAE, 0xAC))])
        if draw.randrange(4) == 0:
            program.jump(program.here + 3 + len(loop))  # the flags are LDA's
        program.add(*loop, branch, -len(loop) - 2 & 0xFF)
        program.add(0x86, 0xA0, 0x84, 0xA1, 0x85, 0xA2, 0xE6, 0xA3, 0xA5, 0xA3, 0x0A, 0x85, COLUBK)
    return program.store(VBLANK, 2).jump(frame).build()


def endless_program() -> bytes:
    """Waits and counts the waits at A0, and never begins a frame."""
    program = Program().start()
    again = program.here
    program.add(0xA2, 0, 0xCA, 0xD0, 0xFD, 0xA0, 0x7F, 0x88, 0x10, 0xFD, 0x86, 0xA1, 0xE6, 0xA0)  # LDX #0; DEX; BNE; …
    program.add(0xA9, 100, 0x8D, 0x95, 0x02, 0xAD, 0x84, 0x02, 0xD0, 0xFB)  # TIM8T = 100; LDA INTIM; BNE
    return program.jump(again).build()


def self_modifying_program() -> bytes:
    """A JSR in RAM whose push overwrites its own third byte: it goes to 00C0 rather than to F8C0. Counts at A0."""
    program = Program().start()
    again = program.here
    program.new_frame().store(VBLANK, 0)
    for address, value in zip(range(0xC0, 0xC5), (0xE6, 0xA0, 0x4C, 0x80, 0xF8)):  # INC A0; JMP F880
        program.store(address, value)
    for address, value in zip(range(0xF3, 0xF6), (0x20, 0xC0, 0xF8)):  # JSR F8C0, the last byte at F5
        program.store(address, value)
    program.add(0xA2, 0xF5, 0x9A).jump(0xF3)  # LDX #F5; TXS
    program.code = program.code.ljust(0x80, b"\xea")
    return program.lines(200).store(VBLANK, 2).jump(again).build()


def unfinished_frame_program(access: bytes, lines: int, cycles: int) -> bytes:
    """Colored frames, each another, that end with `access` in mid-picture; while A0 is not 0 they go on for a million
    cycles without another access to the TIA."""
    program = Program().start().store(0xA0, 0).store(COLUPF, 0x1E).store(PF0 + 1, 0xAA)
    frame = program.here
    program.new_frame().store(VBLANK, 0).add(0xA5, 0xA1, 0x85, COLUBK, 0xE6, 0xA1)  # LDA A1; STA; INC A1
    program.lines(lines).wait(cycles).add(*access)
    waits = [0xA0, 0, 0xA2, 0, 0xCA, 0xD0, 0xFD, 0x88, 0xD0, 0xF8] * 3  # LDY #0; LDX #0; DEX; BNE; DEY; BNE
    program.add(0xA5, 0xA0, 0xF0, len(waits), *waits)  # LDA A0; BEQ
    return program.lines(40).jump(frame).build()


def early_vsync_program(gap: int) -> bytes:
    """Clears VSYNC too early, `gap` cycles after it is set, and a second time when it may be; counts at A0."""
    program = Program().start()
    frame = program.here
    program.lines(200).store(VSYNC, 2).wait(gap - 5).store(VSYNC, 0).wait(100).store(VSYNC, 0)
    return program.add(0xE6, 0xA0).jump(frame).build()


def vsync_program(gap: int) -> bytes:
    """Sets VSYNC twice, 100 cycles apart, and clears it `gap` cycles later; counts its frames at A0."""
    program = Program().start()
    frame = program.here
    program.lines(200).store(VSYNC, 2).wait(97).add(0x85, VSYNC, 0xA2, 0).wait(gap - 5).add(0x86, VSYNC)
    return program.add(0xE6, 0xA0).jump(frame).build()


def hmove_program(cycle: int) -> bytes:
    """HMOVE in this cycle of a line, 7, or 9 or later, twenty lines above the window, and nowhere else."""
    program = Program().start().store(COLUBK, 0x1E)
    frame = program.here
    program.new_frame().store(VBLANK, 0).lines(10).wait(cycle - 7).add(0x85, HMOVE).lines(230)
    return program.jump(frame).build()


def resp_program(cycle: int) -> bytes:
    """Two copies of player 0, placed in the middle of a line, and ten lines later in this cycle, 9 or later."""
    program = Program().start().store(COLUP0, 0x1E).store(NUSIZ0, 1).store(GRP0, 0xFF)
    frame = program.here
    program.new_frame().store(VBLANK, 0).lines(60).wait(40).add(0x85, RESP0).lines(10).wait(cycle - 7).add(0x85, RESP0)
    return program.lines(150).jump(frame).build()


def low_resp_program(register: int, lines: int, cycle: int) -> bytes:
    """Two copies of the players, one of them placed in mid-picture and again, lower, in cycle 7 or later."""
    program = Program().start().store(COLUP0, 0x1E).store(COLUP0 + 1, 0x46)
    for first, value in ((NUSIZ0, 1), (GRP0, 0xFF)):
        program.store(first, value).store(first + 1, value)
    frame = program.here
    program.new_frame().store(VBLANK, 0).lines(100).wait(56).add(0x85, register, 0x85, WSYNC)
    return program.lines(lines).wait(cycle - 7).add(0x85, register, 0x85, WSYNC).lines(20).jump(frame).build()


def mirror_program(cycle: int) -> bytes:
    """Turns the playfield's reflection on in this cycle of a line, 11 or later, and again, with the same value, early
    in the next line; off above the window."""
    program = Program().start().store(COLUPF, 0x1E).store(PF0, 0x10)
    frame = program.here
    program.new_frame().store(VBLANK, 0).store(CTRLPF, 0).lines(20).add(0xA9, 1).wait(cycle - 9).add(0x85, CTRLPF)
    return program.add(0x85, WSYNC, 0x85, CTRLPF).lines(200).jump(frame).build()


def late_mirror_program(lines: int) -> bytes:
    """Turns the playfield's reflection on late in this line, and off late in the fifth line below it."""
    program = Program().start().store(COLUBK, 0x38).store(COLUPF, 0x1E).store(PF0, 0xF0)
    frame = program.here
    program.new_frame().store(VBLANK, 0).lines(lines).wait(46).store(CTRLPF, 1).add(0x85, WSYNC)
    return program.lines(4).wait(46).store(CTRLPF, 0).add(0x85, WSYNC).lines(6).jump(frame).build()


def short_frame_program() -> bytes:
    """A colored frame of 240 lines, or of 40 while A0 is not 0."""
    program = Program().start()
    frame = program.here
    program.new_frame().store(VBLANK, 0).store(COLUBK, 0x38).lines(40).add(0xA5, 0xA0, 0xD0, 7)  # LDA A0; BNE
    return program.lines(200).jump(frame).build()


def timer_code_program(first: int) -> bytes:
    """Runs the timer as code when it has counted from `first` to 60, RTS, and counts the returns at A0."""
    program = Program().start()
    frame = program.here
    program.new_frame().lines(60).add(0xA9, first, 0x8D, TIM64T & 0xFF, TIM64T >> 8).wait(64 * (first - 0x60) - 20)
    return program.add(0x20, INTIM & 0xFF, INTIM >> 8, 0xE6, 0xA0).lines(100).jump(frame).build()


def shaking_program(register: int, lines: int) -> bytes:
    """Writes HMM0 21 cycles after an HMOVE, which missile 0 never stops to obey, and `register` so many lines later."""
    program = Program().start().store(COLUP0, 0x1E).store(ENAM0, 2)
    frame = program.here
    program.new_frame().store(NUSIZ0, 0x20).store(HMM0, 0x70).lines(60).wait(40).add(0x85, RESM0)
    program.add(0x85, WSYNC, 0x85, HMOVE).wait(16).store(HMM0, 0x60)
    program.lines(lines).wait(10).store(register, 0x10).lines(40).store(ENAM0, 2).lines(120)
    return program.jump(frame).build()


def still_program(size: int, ram: bytes, has_ram: bool = False, counter: int = 0) -> bytes:
    """A cartridge of `size` bytes that writes `ram` into RAM at the start and nothing afterwards.

    Every KB holds the program, so that it starts in all types of cartridge. `has_ram`: as in `instruction_program`; it
    copies the console's RAM there in every frame. `counter`: an address that it counts the frames at, or 0.
    """
    program = Program().start()
    for address, byte in enumerate(ram, 0x80):
        program.store(address, byte)
    frame = program.here
    program.new_frame()
    if has_ram:
        program.add(0xA2, 0x7F, 0xB5, 0x80, 0x9D, 0x00, 0xF0, 0xCA, 0x10, 0xF8)  # LDX #; LDA 80,X; STA F000,X
    if counter:
        program.add(0xE6, counter)  # INC
    program.lines(200).jump(frame)
    assert len(program.code) <= 1024 - 6
    kilobyte = bytes(program.code.ljust(1024 - 6, b"\xea")) + 3 * bytes([ORIGIN & 0xFF, ORIGIN >> 8])
    bank = bytes(2048) + 2 * kilobyte if has_ram else kilobyte
    return bank * (size // len(bank))


# Subroutines of `sweep_program`. DELAY takes a cycle less in every frame, through all 76 of a line. OTHER_DELAY changes
# by 9 cycles whenever DELAY begins anew. SHOW waits for two lines and folds the collisions into RAM A0 to A7.
DELAY, OTHER_DELAY, SHOW = ORIGIN + 0x50, ORIGIN + 0x53, ORIGIN + 0x56
SWEEP_FRAMES = 76
STROBES = range(RESP0, RESP0 + 5)  # players, missiles, ball


def sweep_program(bands: list[tuple[Program, Program]]) -> bytes:
    """Bands of the picture, each with what prepares it, and code that begins in each cycle of a line within 76 frames.

    Each band is shown for some lines more and folds its collisions into RAM A0 to A7.
    """
    slide, end = ORIGIN + 3, ORIGIN + 0x4F  # CMP #$C9 all along, CMP $EA or NOP at its end: a byte less is a cycle less
    program = Program().jump(ORIGIN + 0x80).add(*[0xC9] * 74, 0xC5, 0xEA, 0x60)
    program.add(0x6C, 0xC0, 0x00, 0x6C, 0xC2, 0x00)  # DELAY: JMP ($C0); OTHER_DELAY: JMP ($C2)
    program.add(0x85, WSYNC, 0x85, WSYNC, 0xA2, 7)  # SHOW: … LDX #7
    program.add(0xB5, 0x30, 0x55, 0xA0, 0x4A, 0x90, 2, 0x49, 0xB8, 0x95, 0xA0, 0xCA, 0x10, 0xF2)  # LDA CX,X; …; BPL
    program.add(0x85, CXCLR, 0x60)
    program.code = program.code.ljust(0x80, b"\xea")
    program.start()
    for address in (0xC0, 0xC2):
        program.store(address, slide & 0xFF).store(address + 1, slide >> 8)
    frame = program.here
    program.new_frame().store(VBLANK, 0).lines(32)
    for before, code in bands:
        program.add(*before.code, 0x85, WSYNC).call(DELAY).add(*code.code).call(SHOW)
    program.add(0xE6, 0xC0, 0xA5, 0xC0, 0xC9, end & 0xFF, 0xD0, 16).store(0xC0, slide & 0xFF)  # INC; LDA; CMP #; BNE
    program.add(0xA5, 0xC2, 0x69, 8, 0xC9, end & 0xFF, 0x90, 2, 0xA9, slide & 0xFF, 0x85, 0xC2)  # 9 more, or anew
    return program.lines(4).jump(frame).build()


def picture() -> Program:
    """All objects in sight, in all colors."""
    program = Program().store(GRP0, 0x95).store(GRP0 + 1, 0xE1)
    for i, color in enumerate((0x1E, 0x46, 0x86, 0x02)):
        program.store(COLUP0 + i, color)
    return program.add(0xA9, 2, 0x85, ENAM0, 0x85, ENAM0 + 1, 0x85, ENAM0 + 2)


def place_objects() -> Program:
    program = Program().add(0x85, WSYNC).call(OTHER_DELAY)
    for register in STROBES:
        program.add(0x85, register, 0xEA, 0xEA)
    return program


def hmove_bands() -> list[tuple[Program, Program]]:
    """HMOVE with each value of HMxx."""
    bands = []
    for motion in range(0, 0x100, 0x10):
        before = place_objects() if motion else picture().add(*place_objects().code)
        before.add(0xA9, motion, *(byte for i in range(5) for byte in (0x85, HMP0 + i)))
        bands.append((before, Program().add(0x85, HMOVE)))
    return bands


def strobe_bands(seed: int) -> list[tuple[Program, Program]]:
    """One to three strobes of objects of all sizes and numbers, which are placed and moved in a line above."""
    draw, bands = random.Random(seed), []
    for mode in range(20):
        before = picture() if mode == 0 else Program()
        before.store(NUSIZ0, mode % 8 | draw.randrange(4) << 4).store(NUSIZ0 + 1, mode % 8 | draw.randrange(4) << 4)
        before.store(CTRLPF, draw.randrange(256)).store(HMP0 + draw.randrange(5), draw.randrange(256))
        before.add(*place_objects().code, 0x85, WSYNC, 0x85, HMOVE)
        register, stores = STROBES[(seed + mode // 4) % 5], (0x85, 0x85, 0xE6)  # STA, or INC, which reads it first
        code = Program().add(draw.choice(stores), register)
        for _ in range(draw.randrange(3)):
            code.wait(draw.choice([0, 0, 2, 3, 4, 5, 6, 9, 14]))
            code.add(draw.choice(stores), draw.choice([register, register, *STROBES]))
        bands.append((before, code))
    return bands


def strobe_after_hmove_bands(register: int) -> list[tuple[Program, Program]]:
    """The strobe of an object 3 to 27 cycles after an HMOVE."""
    bands = []
    for gap in range(3, 28):
        code = Program().add(0x85, HMOVE)
        code.add(0x8D, register, 0) if gap == 4 else code.wait(gap - 3).add(0x85, register)
        bands.append((picture() if gap == 3 else Program(), code))
    return bands


def register_bands(seed: int) -> list[tuple[Program, Program]]:
    """A write of each register that changes it, sometimes with another write behind it, over a picture at random."""
    draw, bands = random.Random(seed), []
    registers = sorted(set(REGISTERS))
    for i in range(24):
        register, value = registers[(24 * seed + i) % len(registers)], draw.randrange(256)
        before = Program() if i else picture()
        for _ in range(3):
            before.store(draw.choice(REGISTERS), draw.randrange(256))
        if i % 3 == 0:
            before.add(*place_objects().code)
        before.store(ENAM0 + 2, draw.randrange(256)).add(0xA9, 2, 0x85, ENAM0, 0x85, ENAM0 + 1)
        before.add(0xA9, 0, 0x85, RESMP0, 0x85, RESMP0 + 1)
        if register not in (HMCLR, CXCLR):
            before.store(register, value ^ 0xFF)
        before.add(0xA9, value, 0xA2, draw.randrange(256))  # LDA #; LDX #
        code = Program().add(0x85, register)
        if HMP0 <= register <= HMP0 + 4 or register == HMCLR:
            code.add(0x86, HMOVE)
        elif draw.randrange(3) == 0:
            code.add(0x86, draw.choice(registers))
        bands.append((before, code))
    bands[12] = bands[12][0], Program().store(VBLANK, 2).wait(draw.randrange(2, 40)).store(VBLANK, 0)
    return bands


def read_timer(*registers: int) -> Program:
    program = Program()
    for register in registers:
        program.add(0xAD, register & 0xFF, register >> 8).fold(0xA8 + register - INTIM)
    return program


def timer_bands(*registers: int) -> list[tuple[Program, Program]]:
    """Reads these registers of the timer in the 76 cycles around its end."""
    bands = []
    for timer, shift in enumerate((0, 3, 6, 10)):
        for value in ((0, 30, 60, 80, 255), (0, 3, 6, 9, 33), (0, 1, 2, 5), (0, 1, 2))[timer]:
            code = Program().add(0x8D, (TIM1T & 0xFF) + timer, TIM1T >> 8)
            rounds = ((value << shift) - 60) // 10
            if rounds > 0:
                code.add(*[0xA2, rounds, 0xCA, 0xD0, 0xFD] * 2)  # LDX #rounds; DEX; BNE
            code.call(DELAY).add(*read_timer(*registers).code)
            bands.append((Program().add(0xA9, value), code))
    return bands


def short_timer_bands() -> list[tuple[Program, Program]]:
    """Reads a timer 4 to 22 cycles after it is set to 3, and to one more in every frame."""
    bands = []
    for cycles in [4, *range(6, 23)]:
        code = Program().add(0x8D, (TIM1T & 0xFF) + cycles % 2, TIM1T >> 8).wait(cycles - 4)
        bands.append((Program().add(0xA5, 0xC0), code.add(*read_timer(INTIM, INTIM + 1).code)))  # LDA $C0
    return bands


def decimal_program(operation: list[int]) -> bytes:
    """In a frame: an operation in decimal mode on A and each value of RAM A4, its results and flags folded into RAM.

    The carry is at A0 and A at A1: each frame has others.
    """
    program = Program().start().store(0xA0, 0).store(0xA1, 0)
    frame = program.here
    program.new_frame().add(0xF8, 0xA2, 0)  # SED; LDX #0
    again = program.here
    program.add(0x86, 0xA4)
    program.add(0xA5, 0xA0, 0x4A, 0xA5, 0xA1, *operation, 0x08).fold(0xA2)  # LDA A0; LSR; LDA A1; …; PHP
    program.add(0x68).fold(0xA3)  # PLA
    program.add(0xE8, 0xD0, again - program.here - 3 & 0xFF)  # INX; BNE
    program.add(0xD8, 0xA5, 0xA0, 0x49, 1, 0x85, 0xA0, 0xD0, 2, 0xE6, 0xA1)  # the other carry, then the next A
    return program.jump(frame).build()


def rti_program() -> bytes:
    """Returns from an interrupt with other flags in every frame; how long it takes is at A0, the flags at A1."""
    program = Program().start()
    frame = program.here
    program.new_frame().lines(200)
    back = program.here + 17
    program.add(0xA9, back >> 8, 0x48, 0xA9, back & 0xFF, 0x48, 0xE6, 0xA2, 0xA5, 0xA2, 0x48)  # …; LDA A2; PHA
    program.add(0xA9, 100, 0x8D, TIM1T & 0xFF, TIM1T >> 8, 0x40, 0x08)  # …; RTI; PHP
    return program.add(0xAD, INTIM & 0xFF, INTIM >> 8, 0x85, 0xA0, 0x68, 0x85, 0xA1).jump(frame).build()


def tall_program(lines: int, ram: dict[int, int]) -> bytes:
    """Frames of this many lines, which it counts at A0, with `ram`; 4 KB."""
    program = Program().start()
    for address, byte in ram.items():
        program.store(address, byte)
    frame = program.here
    program.new_frame()
    for half in (lines // 2, lines - lines // 2 - 4):
        program.add(0xA2, half, 0x85, WSYNC, 0xE6, 0xA0, 0x86, COLUBK, 0xCA, 0xD0, 0xF7)  # LDX #; …; BNE
    return 2 * program.jump(frame).build()


def two_players_program(second: int) -> bytes:
    """Places player 1 in cycle 73 of a line, while it is drawn, and player 0 in cycle `second` of the same count."""
    program = Program().start().store(COLUP0, 0x1E).store(COLUP0 + 1, 0x46).store(GRP0, 0xFF).store(GRP0 + 1, 0xFF)
    frame = program.here
    program.new_frame().store(VBLANK, 0).lines(60).wait(40).add(0x85, RESP0, 0x85, WSYNC).wait(68).add(0x85, RESP1)
    program.lines(10).wait(66).add(0x85, RESP1).wait(second - 76).add(0x85, RESP0)
    return program.lines(100).jump(frame).build()
