"""A map of our own for small duels: one room, where two players stand at opposite walls and see each other."""

import struct

WIDTH, DEPTH, HEIGHT = 192, 256, 128  # in DOOM's units; a player is 32 wide. In a larger room chance hits more rarely.
DISTANCE = 48  # of a player from the wall behind
DEATHMATCH_START = 11  # type of a thing
NORTH, SOUTH = 90, 270  # degrees
CORNERS = ((0, 0), (0, DEPTH), (WIDTH, DEPTH), (WIDTH, 0))


def arena() -> bytes:
    """A WAD with the map as text (UDMF), which ZDoom reads without nodes."""
    lines = ['namespace = "zdoom";']
    lines += [f"vertex {{ x = {x}; y = {y}; }}" for x, y in CORNERS]
    for side in range(len(CORNERS)):
        lines.append(
            f"linedef {{ v1 = {side}; v2 = {(side + 1) % len(CORNERS)}; sidefront = {side}; blocking = true; }}"
        )
        lines.append('sidedef { sector = 0; texturemiddle = "BROWN1"; }')
    textures = 'texturefloor = "FLOOR0_1"; textureceiling = "CEIL1_1"'
    lines.append(f"sector {{ heightfloor = 0; heightceiling = {HEIGHT}; {textures}; lightlevel = 255; }}")
    skills = " ".join(f"skill{n} = true;" for n in range(1, 6))
    for y, angle in ((DISTANCE, NORTH), (DEPTH - DISTANCE, SOUTH)):
        place = f"x = {WIDTH // 2}; y = {y}; angle = {angle}; type = {DEATHMATCH_START};"
        lines.append(f"thing {{ {place} {skills} single = true; dm = true; coop = true; }}")
    return wad({"MAP01": b"", "TEXTMAP": "\n".join(lines).encode(), "ENDMAP": b""})


def wad(lumps: dict[str, bytes]) -> bytes:
    """The bytes of a WAD: a header, the lumps, and a directory of them."""
    header = struct.Struct("<4sii")
    content, directory = b"", b""
    for name, lump in lumps.items():
        directory += struct.pack("<ii8s", header.size + len(content), len(lump), name.encode())
        content += lump
    return header.pack(b"PWAD", len(lumps), header.size + len(content)) + content + directory
