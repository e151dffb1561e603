"""Programs of 2 KB for the console, as bytes: what games do, at random, and single rules of the machine.

They leave RAM 90-93 alone, where Boxing, under whose name they run, keeps the time and the score.
"""

from __future__ import annotations

import random

ORIGIN = 0xF800
VSYNC, VBLANK, WSYNC, COLUBK, HMOVE, CXCLR = 0x00, 0x01, 0x02, 0x09, 0x2A, 0x2C
INTIM, TIM1T = 0x284, 0x294
# Without sync and sound, and without RESP0 and RESP1: see KNOWN_DIFFERENCES.
REGISTERS = [r for r in range(0x04, 0x2D) if not 0x10 <= r <= 0x11 and not 0x15 <= r <= 0x1A]
# Strobes and graphics matter most.
REGISTERS += [0x12, 0x13, 0x14, 0x1B, 0x1C, HMOVE, 0x0D, 0x0E, 0x0F] * 2
KNOWN_DIFFERENCES = """
RESP0 or RESP1 near a line's left edge, without an HMOVE: a few of the pixels 0-15 differ from ALE's in that line.
"""
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
        """2 cycles or more."""
        if cycles % 2:
            self.add(0x24, 0xFF)  # BIT $FF, 3 cycles
            cycles -= 3
        return self.add(*[0xEA] * (cycles // 2))

    def jump(self, address: int) -> Program:
        return self.add(0x4C, address & 0xFF, address >> 8)

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


def vsync_program(gap: int) -> bytes:
    """Sets VSYNC twice, 100 cycles apart, and clears it `gap` cycles later; counts its frames at A0."""
    program = Program().start()
    frame = program.here
    program.lines(200).store(VSYNC, 2).wait(97).add(0x85, VSYNC, 0xA2, 0).wait(gap - 5).add(0x86, VSYNC)
    return program.add(0xE6, 0xA0).jump(frame).build()


def hmove_program() -> bytes:
    """HMOVE twenty lines above the window, and nowhere else."""
    program = Program().start().store(COLUBK, 0x1E)
    frame = program.here
    program.new_frame().store(VBLANK, 0).lines(10).add(0x85, HMOVE).lines(230)
    return program.jump(frame).build()
