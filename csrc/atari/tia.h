// The TIA: registers, positions, the picture and its collisions, as ALE's table-driven TIA behaves.
//
// An object is 160 bits, one for each pixel of a line. A write first keeps what the object has shown in this line up to
// where the register changes, by the register's delay, then changes the bits. At the end of the line its picture is
// layers of such bits, and a collision is two objects' bits in common.
//
// Time is in CPU cycles since the start of the frame's line 0, a line being 76. A clock is a third of a cycle; a line
// has 228, the first 68 of them blank.
#pragma once

#include <stdint.h>
#include <string.h>

#include "device.h"

namespace beast::atari {

constexpr int kWidth = 160;
constexpr int kLineCycles = 76;
constexpr int kLineClocks = 228;
constexpr int kBlankClocks = 68;
constexpr int kLongAgo = -100000;  // cycles

// Registers that a program writes, in the order of their addresses. A strobe acts whatever value is written.
// clang-format off
enum Register : uint8_t {
  kVsync, kVblank, kWsync, kRsync, kNusiz0, kNusiz1, kColup0, kColup1, kColupf, kColubk, kCtrlpf, kRefp0, kRefp1,
  kPf0, kPf1, kPf2, kResp0, kResp1, kResm0, kResm1, kResbl, kAudc0, kAudc1, kAudf0, kAudf1, kAudv0, kAudv1,
  kGrp0, kGrp1, kEnam0, kEnam1, kEnabl, kHmp0, kHmp1, kHmm0, kHmm1, kHmbl, kVdelp0, kVdelp1, kVdelbl,
  kResmp0, kResmp1, kHmove, kHmclr, kCxclr
};
// clang-format on
// Registers that it reads; the first eight tell collisions.
enum ReadRegister : uint8_t { kInpt0 = 8, kInpt4 = 12, kInpt5 };
static_assert(kWsync == 0x02 && kResp0 == 0x10 && kGrp0 == 0x1B && kHmp0 == 0x20 && kCxclr == 0x2C, "as in hardware");
constexpr int kNumValueRegisters = kHmove;  // the registers behind them are strobes

// The TIA decodes six bits of an address only.
HD constexpr int register_of(int address) { return address & 0x3F; }

enum Object : uint8_t { kP0, kP1, kM0, kM1, kBL, kPF, kNumObjects };

// What may differ from the line before: nothing; the colors; the collisions, too.
enum News : uint8_t { kNoNews, kNewColors, kNewMasks };

// The bits of one line: pixel i is bit i % 64 of word i / 64.
struct Mask {
  uint64_t words[3];
};

struct Tia {
  Mask masks[kNumObjects];
  Mask kept[kNumObjects];      // what an object that changed in this line has shown before
  int32_t hmove_cycle;
  int32_t vsync_cycle;         // when VSYNC was last written with bit 1 set
  int32_t discharged_cycle;    // when VBLANK bit 7 let go of the paddles' capacitors
  int32_t paddle_cycles[4];    // until INPT0-3 read 1 after that; negative: no paddle
  int16_t line;
  uint8_t pixel;               // no register can change the line's pixels before this one any more
  uint8_t drawn;               // the pixels before this one are drawn, and their collisions known
  uint8_t changed;             // bit per object: whether its mask changed between the two
  uint8_t since[kNumObjects];  // from where on its mask holds, if it changed; `kept` holds to the left
  News news;
  uint8_t enabled;             // bit per object: whether it shows anything at all
  uint16_t collisions;         // bit per pair, see pair()
  uint8_t position[5];         // P0 P1 M0 M1 BL
  uint8_t motion[5];           // HMxx, high nibble
  uint8_t size[2];             // NUSIZ
  uint8_t color[4];            // COLUP0 COLUP1 COLUPF COLUBK
  uint8_t control;             // CTRLPF
  uint8_t mirrored;            // whether the right half is mirrored in this line
  uint8_t reflected[2];        // REFP
  uint8_t playfield[3];        // PF
  uint8_t graphics[2];         // GRP
  uint8_t old_graphics[2];
  uint8_t missile_on[2];       // ENAM
  uint8_t ball_on, old_ball_on;
  uint8_t delayed[3];          // VDELP0 VDELP1 VDELBL
  uint8_t locked[2];           // RESMP
  uint8_t vsync, vblank;
  uint8_t without_first[2];    // a player was reset in mid-line and has lost its first copy
  uint8_t blank_left;          // HMOVE blanks the first 8 pixels of this line
  uint8_t blank_left_next;     // of the next line
  uint8_t blank_left_before;   // of the line before
  uint8_t line_work;           // start_line has something to do
  uint8_t shaking;             // missile 0's motion goes on until the next HMOVE ("Cosmic Ark")
  uint8_t shake_step;          // lines since it began to shake, modulo 4
  uint8_t shake_shape;         // in step 1 it is wider, in step 2 hidden, unless it was placed anew in this line
  uint8_t color_loss;          // 1: the last frame of a PAL game had an odd number of lines, all colors get this bit
  uint8_t frame_over;
  uint8_t fire[2];             // INPT4, INPT5: 0x80, or 0 while pressed
  uint8_t written[kNumValueRegisters];  // what a register was last written with
};

// What does not change within a frame.
struct TiaSettings {
  int16_t first_line;
  int16_t height;
  int16_t line_limit;
  uint8_t hmove_blanks;
};

// clang-format off
TABLE int kCopies[8][3] = {{0, -1, -1}, {0, 16, -1}, {0, 32, -1}, {0, 16, 32}, {0, 64, -1}, {0, -1, -1}, {0, 32, 64}, {0, -1, -1}};
// clang-format on

struct Tables {
  uint8_t reversed[256];
  uint64_t bytes[256];   // 0xFF in byte i where bit i is set
  uint16_t cells[16];    // each bit four times
  uint16_t pairs[64];    // the pairs among a set of objects
  Mask before[kWidth + 1];  // the pixels of a line before this one
};

// The bit of two objects' collision, i < j.
HD constexpr int pair(int i, int j) { return 1 << (j * (j - 1) / 2 + i); }

constexpr Tables make_tables() {
  Tables tables{};
  for (int i = 0; i < 256; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      if (i >> bit & 1) {
        tables.reversed[i] |= 0x80 >> bit;
        tables.bytes[i] |= 0xFFull << (8 * bit);
        if (i < 16) tables.cells[i] |= 0xF << (4 * bit);
      }
    }
  }
  for (int set = 0; set < 64; ++set) {
    for (int j = 1; j < kNumObjects; ++j) {
      for (int i = 0; i < j; ++i) {
        if ((set >> i & 1) && (set >> j & 1)) tables.pairs[set] |= pair(i, j);
      }
    }
  }
  for (int i = 0; i <= kWidth; ++i) {
    for (int x = 0; x < i; ++x) tables.before[i].words[x / 64] |= 1ull << x % 64;
  }
  return tables;
}
TABLE Tables kTables = make_tables();

// Adds `bits` (up to 32) to a line from pixel `x` on; what does not fit continues on the left.
HD inline void place(Mask& mask, uint64_t bits, int x) {
  const unsigned shift = x & 63;
  const uint64_t low = bits << shift, high = bits >> 1 >> (63 - shift);
  if (x < 64) {
    mask.words[0] |= low;
    mask.words[1] |= high;
  } else if (x < 128) {
    mask.words[1] |= low;
    mask.words[2] |= high;
  } else {
    mask.words[2] |= low & 0xFFFFFFFF;
    mask.words[0] |= low >> 32;
  }
}

HD inline int wrap(int x) { return x < 0 ? x + kWidth : x >= kWidth ? x - kWidth : x; }

HD inline uint32_t doubled(uint32_t byte) {
  uint32_t x = (byte | byte << 4) & 0x0F0F;
  x = (x | x << 2) & 0x3333;
  x = (x | x << 1) & 0x5555;
  return x * 3;
}
HD inline uint32_t quadrupled(uint32_t byte) {
  return kTables.cells[byte & 15] | static_cast<uint32_t>(kTables.cells[byte >> 4]) << 16;
}

HD inline void set_object(Tia& tia, int object, const Mask& mask, bool enabled) {
  tia.masks[object] = mask;
  tia.enabled = static_cast<uint8_t>((tia.enabled & ~(1 << object)) | (enabled << object));
  tia.news = kNewMasks;
}

HD NOINLINE inline void place_player(Tia& tia, int player) {
  const uint8_t graphics = (tia.delayed[player] ? tia.old_graphics : tia.graphics)[player];
  if (!graphics && !(tia.enabled >> player & 1)) return;  // it goes on showing nothing
  Mask mask{};
  if (graphics) {
    const int mode = tia.size[player] & 7;
    uint32_t bits = tia.reflected[player] ? graphics : kTables.reversed[graphics];
    int x = tia.position[player];
    if (mode == 5) bits = doubled(bits);
    if (mode == 7) bits = quadrupled(bits);
    if (mode == 5 || mode == 7) ++x;
    for (int i = tia.without_first[player]; i < 3 && kCopies[mode][i] >= 0; ++i) place(mask, bits, wrap(x + kCopies[mode][i]));
  }
  set_object(tia, kP0 + player, mask, graphics != 0);
}

HD NOINLINE inline void place_missile(Tia& tia, int missile) {
  const bool on = tia.missile_on[missile] && !tia.locked[missile];
  Mask mask{};
  const int shape = missile == 0 ? tia.shake_shape : 0;
  if (on && shape != 2) {
    const int mode = tia.size[missile] & 7;
    int width = 1 << (tia.size[missile] >> 4 & 3);
    if (shape == 1 && (width == 1 || width == 4)) width *= 2;
    for (int i = 0; i < 3 && kCopies[mode][i] >= 0; ++i) {
      place(mask, (1u << width) - 1, wrap(tia.position[kM0 + missile] + kCopies[mode][i]));
    }
  }
  set_object(tia, kM0 + missile, mask, on);
}

HD NOINLINE inline void place_ball(Tia& tia) {
  const bool on = tia.delayed[2] ? tia.old_ball_on : tia.ball_on;
  Mask mask{};
  if (on) place(mask, (1u << (1 << (tia.control >> 4 & 3))) - 1, tia.position[kBL]);
  set_object(tia, kBL, mask, on);
}

// P0 to BL: each that has a position.
HD inline void place_object(Tia& tia, int object) {
  if (object < kM0) {
    place_player(tia, object);
  } else if (object < kBL) {
    place_missile(tia, object - kM0);
  } else {
    place_ball(tia);
  }
}

HD NOINLINE inline void place_playfield(Tia& tia) {
  const uint8_t pf0 = tia.playfield[0] >> 4, pf1 = tia.playfield[1], pf2 = tia.playfield[2];
  // Each half has 80 pixels: the first 64, and the last 16.
  const uint64_t last_byte = quadrupled(pf2);
  const uint64_t left = kTables.cells[pf0] | static_cast<uint64_t>(quadrupled(kTables.reversed[pf1])) << 16 | last_byte << 48;
  const uint64_t left_end = last_byte >> 16;
  uint64_t right = left, right_end = left_end;
  if (tia.mirrored) {
    right = quadrupled(kTables.reversed[pf2]) | static_cast<uint64_t>(quadrupled(pf1)) << 32;
    right_end = kTables.cells[kTables.reversed[pf0] >> 4];
  }
  const Mask mask = {{left, left_end | right << 16, right >> 48 | right_end << 16}};
  set_object(tia, kPF, mask, (pf0 | pf1 | pf2) != 0);
}

// clang-format off
TABLE uint8_t kGrays[128] = {
      0,  74, 111, 142, 170, 192, 214, 236,     64,  95, 122, 148, 172, 193, 214, 233,
     63,  87, 110, 131, 150, 167, 184, 199,     59,  85, 107, 129, 148, 167, 183, 199,
     44,  68,  90, 110, 128, 146, 161, 176,     51,  74,  95, 115, 132, 149, 164, 178,
     39,  63,  85, 107, 125, 143, 159, 174,     22,  49,  73,  96, 116, 136, 153, 169,
     17,  41,  64,  85, 104, 121, 137, 153,     32,  60,  85, 109, 130, 150, 168, 186,
     40,  69,  95, 120, 141, 162, 182, 200,     43,  74, 101, 127, 151, 173, 193, 212,
     40,  71,  98, 124, 147, 169, 189, 207,     41,  74, 104, 132, 157, 181, 203, 223,
     47,  79, 107, 133, 157, 179, 200, 220,     47,  79, 107, 133, 157, 179, 200, 220,
};
// clang-format on

// What one frame is drawn into: rows of 160 bytes, or nothing.
struct Canvas {
  uint8_t* pixels;
  int height;
  bool gray;  // luminances instead of palette indices
  Lanes lanes = kAllLanes;  // of a warp on a GPU: those that emulate this frame

  HD uint8_t* row(int i) const { return i < height ? pixels + i * kWidth : nullptr; }
  HD uint8_t shade(uint8_t color) const { return gray ? kGrays[color >> 1] : color; }
};

// The pixels [begin, end) of a line.
HD inline Mask range(int begin, int end) {
  const Mask &high = kTables.before[end], &low = kTables.before[begin];
  return {{high.words[0] & ~low.words[0], high.words[1] & ~low.words[1], high.words[2] & ~low.words[2]}};
}

HD inline Mask either(const Mask& a, const Mask& b) {
  return {{a.words[0] | b.words[0], a.words[1] | b.words[1], a.words[2] | b.words[2]}};
}
HD inline Mask both(const Mask& a, const Mask& b) {
  return {{a.words[0] & b.words[0], a.words[1] & b.words[1], a.words[2] & b.words[2]}};
}

// What the objects show in a stretch of a line: `present` has a bit for each that may show anything.
struct Layers {
  const Mask* masks;
  int present;
};
// The objects that may show in the part of the line that is not drawn yet.
HD inline int present_objects(const Tia& tia) { return (tia.enabled | tia.changed) & 63; }

HD inline void collide(Tia& tia, const Layers& layers, const Mask& where) {
  Mask seen{}, twice{};
  for (int i = 0; i < kNumObjects; ++i) {
    if (!(layers.present >> i & 1)) continue;
    for (int w = 0; w < 3; ++w) {
      twice.words[w] |= seen.words[w] & layers.masks[i].words[w];
      seen.words[w] |= layers.masks[i].words[w];
    }
  }
  twice = both(twice, where);
  if ((twice.words[0] | twice.words[1] | twice.words[2]) == 0) return;
  for (int j = 1; j < kNumObjects; ++j) {
    for (int i = 0; i < j; ++i) {
      const uint64_t* a = layers.masks[i].words;
      const uint64_t* b = layers.masks[j].words;
      if ((a[0] & b[0] & twice.words[0]) | (a[1] & b[1] & twice.words[1]) | (a[2] & b[2] & twice.words[2])) {
        tia.collisions |= pair(i, j);
      }
    }
  }
}

// Colors the pixels of a layer within `where`, eight at a time.
HD inline void paint(uint8_t* row, const Mask& layer, const Mask& where, uint8_t color) {
  const uint64_t colors = color * 0x0101010101010101ull;
  for (int w = 0; w < 3; ++w) {
    uint64_t bits = layer.words[w] & where.words[w];
    for (int group = 8 * w; bits; ++group, bits >>= 8) {
      if (!(bits & 0xFF)) continue;
      const uint64_t mask = kTables.bytes[bits & 0xFF];
      uint64_t pixels;
      memcpy(&pixels, row + 8 * group, 8);
      pixels = (pixels & ~mask) | (colors & mask);
      memcpy(row + 8 * group, &pixels, 8);
    }
  }
}

HD inline void draw_row(const Tia& tia, const Layers& layers, const Canvas& canvas, uint8_t* row, int begin, int end,
                        const Mask& where) {
  const auto shade = [&](int i) { return canvas.shade(tia.color[i] | tia.color_loss); };
  memset(row + begin, shade(3), static_cast<size_t>(end - begin));
  const auto paint_player = [&](int i) {
    if (layers.present >> i & 5) {
      paint(row, either(layers.masks[kP0 + i], layers.masks[kM0 + i]), where, shade(i));
    }
  };
  const auto paint_playfield = [&](bool halves) {
    if (!(layers.present >> kPF & 1)) return;
    if (!halves) return paint(row, layers.masks[kPF], where, shade(2));
    Mask left = where, right = where;
    left.words[1] &= 0xFFFF;
    left.words[2] = 0;
    right.words[0] = 0;
    right.words[1] &= ~0xFFFFull;
    paint(row, layers.masks[kPF], left, shade(0));
    paint(row, layers.masks[kPF], right, shade(1));
  };
  const auto paint_ball = [&] {
    if (layers.present >> kBL & 1) paint(row, layers.masks[kBL], where, shade(2));
  };
  const bool score = tia.control & 2;
  if (tia.control & 4) {  // the playfield is in front
    paint_player(1);
    paint_player(0);
    // There is no score mode then, but as long as nothing else is enabled ALE still has it.
    paint_playfield(score && tia.enabled == 1 << kPF);
    paint_ball();
  } else if (score) {  // halves in the players' colors, between the two
    paint_ball();
    paint_player(1);
    paint_playfield(true);
    paint_player(0);
  } else {
    paint_playfield(false);
    paint_ball();
    paint_player(1);
    paint_player(0);
  }
  if (tia.blank_left && begin < 8) memset(row + begin, canvas.shade(0), static_cast<size_t>((end < 8 ? end : 8) - begin));
}

// Draws the line before pixel `end` and sees its collisions.
HD NOINLINE inline void draw_line(Tia& tia, const TiaSettings& settings, const Canvas& canvas, int end) {
  const int begin = tia.drawn, changed = tia.changed, row = tia.line - settings.first_line;
  Layers layers = {tia.masks, present_objects(tia)};
  tia.drawn = static_cast<uint8_t>(end);
  tia.changed = 0;
  if (begin >= end || row < 0 || row >= settings.height) return;  // outside of the window not even collisions exist
  uint8_t* const pixels = canvas.row(row);
  if (tia.vblank & 2) {
    if (pixels) memset(pixels + begin, canvas.shade(0), static_cast<size_t>(end - begin));
    return;
  }
  const bool is_plain = begin == 0 && end == kWidth && !changed;  // the masks as they stand are right for all of it
  if (is_plain && !tia.news && tia.blank_left == tia.blank_left_before) {
    if (pixels) memcpy(pixels, pixels - kWidth, kWidth);
    return;
  }
  const bool may_collide =
      (tia.news == kNewMasks || !is_plain) && (kTables.pairs[layers.present] & ~tia.collisions) != 0;
  tia.news = is_plain ? kNoNews : kNewMasks;
  if (!pixels && !may_collide) return;
  const Mask where = range(begin, end);
  Mask mixed[kNumObjects];
  if (changed) {
    for (int i = 0; i < kNumObjects; ++i) {
      mixed[i] = tia.masks[i];
      if (changed >> i & 1) mixed[i] = either(tia.kept[i], both(mixed[i], range(tia.since[i], kWidth)));
    }
    layers.masks = mixed;
  }
  if (may_collide) collide(tia, layers, where);
  if (pixels) draw_row(tia, layers, canvas, pixels, begin, end, where);
}

// What changes with the next line. ALE does none of it outside of the window: an HMOVE above it blanks the first row.
HD inline void start_line(Tia& tia, const TiaSettings& settings) {
  const int row = tia.line - settings.first_line;
  ++tia.line;
  tia.pixel = tia.drawn = 0;
  tia.blank_left_before = tia.blank_left;
  if (!tia.line_work || row < 0 || row >= settings.height) return;
  tia.line_work = tia.shaking | tia.blank_left_next;
  tia.blank_left = tia.blank_left_next;
  tia.blank_left_next = 0;
  if (row + 1 == settings.height) {  // the rest waits for the next frame's second row
    tia.line_work |= tia.without_first[0] | tia.without_first[1] | (tia.mirrored != (tia.control & 1));
    return;
  }
  for (int i = 0; i < 2; ++i) {
    if (tia.without_first[i]) {
      tia.without_first[i] = 0;
      place_player(tia, i);
    }
  }
  if (tia.mirrored != (tia.control & 1)) {
    tia.mirrored = tia.control & 1;
    place_playfield(tia);
  }
  if (tia.shaking) {
    constexpr int kToTheLeft[4] = {18, 33, 0, 17};  // pixels, by the step that begins
    tia.shake_step = tia.shake_shape = (tia.shake_step + 1) & 3;
    tia.position[kM0] = static_cast<uint8_t>(wrap(tia.position[kM0] - kToTheLeft[tia.shake_step]));
    place_missile(tia, 0);
  }
}

// Goes on to `clock` with all registers as they are; draws the lines that end on the way.
HD inline void go_on(Tia& tia, const TiaSettings& settings, const Canvas& canvas, int clock) {
  int pixel = clock - tia.line * kLineClocks - kBlankClocks;
  while (pixel >= kWidth) {
    draw_line(tia, settings, canvas, kWidth);
    start_line(tia, settings);
    pixel -= kLineClocks;
  }
  if (pixel > tia.pixel) tia.pixel = static_cast<uint8_t>(pixel);
}

// Finishes the picture for all clocks before `clock`.
HD NOINLINE inline void draw_to(Tia& tia, const TiaSettings& settings, const Canvas& canvas, int clock) {
  go_on(tia, settings, canvas, clock);
  draw_line(tia, settings, canvas, tia.pixel);
}

// A bit for each set of objects that ALE draws four pixels at a time: P0, P1, both; M0, M1, both; BL, and it with P1, M0
// or M1; PF. Without score mode also PF with P0, P1 or BL.
constexpr uint64_t kInFours = 1ull << 1 | 1ull << 2 | 1ull << 3 | 1ull << 4 | 1ull << 8 | 1ull << 12 | 1ull << 16 |
                              1ull << 18 | 1ull << 20 | 1ull << 24 | 1ull << 32;
constexpr uint64_t kInFoursUnscored = 1ull << 33 | 1ull << 34 | 1ull << 48;

// Draws the rest of four pixels where ALE has begun them. It is seen if the frame ends there, or goes on later.
HD NOINLINE inline void draw_ahead(const Tia& tia, const TiaSettings& settings, const Canvas& canvas) {
  const int begin = tia.pixel & ~3, set = tia.enabled & 63;
  if (!canvas.pixels || begin == tia.pixel || (tia.vblank & 2)) return;
  if (!((kInFours | (tia.control & 2 ? 0 : kInFoursUnscored)) >> set & 1)) return;
  const Mask four = range(begin, begin + 4);
  Tia ahead = tia;
  for (int i = 0; i < 2; ++i) {  // a player is drawn pixel by pixel, whatever bits of it are set
    ahead.graphics[i] = ahead.old_graphics[i] = 0xFF;
    if (set >> (kP0 + i) & 1) place_player(ahead, i);
  }
  for (int i = 0; i < kPF; ++i) {
    const Mask shown = both(ahead.masks[i], four);
    if ((set >> i & 1) && (shown.words[0] | shown.words[1] | shown.words[2])) return;
  }
  ahead = tia;
  draw_line(ahead, settings, canvas, begin + 4);
}

// Clears what drawing has left behind, so that a state does not depend on whether its frames were drawn.
HD inline void forget_line(Tia& tia) {
  for (int i = 0; i < kNumObjects; ++i) {
    tia.kept[i] = Mask{};
    tia.since[i] = 0;
  }
}

// Whether a pixel before `clock` is not drawn yet. There is none in a line's horizontal blank.
HD inline bool has_undrawn(const Tia& tia, int clock) {
  const int pixel = clock - tia.line * kLineClocks - kBlankClocks;
  return pixel > tia.drawn || tia.pixel > tia.drawn || pixel >= kWidth;
}

// Goes on to `clock` and keeps what an object has shown in this line, before its mask changes.
HD NOINLINE inline void keep(Tia& tia, const TiaSettings& settings, const Canvas& canvas, int object, int clock) {
  go_on(tia, settings, canvas, clock);
  // With priority and score mode it matters where each object is enabled.
  if ((tia.control & 6) == 6) return draw_line(tia, settings, canvas, tia.pixel);
  if (tia.pixel <= tia.drawn) return;
  const bool has_changed = tia.changed >> object & 1;
  const Mask shown = both(tia.masks[object], range(has_changed ? tia.since[object] : 0, tia.pixel));
  tia.kept[object] = has_changed ? either(tia.kept[object], shown) : shown;
  tia.since[object] = tia.pixel;
  tia.changed |= static_cast<uint8_t>(1 << object);
}

HD inline void reset_tia(Tia& tia) {
  const uint8_t fire[2] = {tia.fire[0], tia.fire[1]};
  int32_t paddles[4];
  for (int i = 0; i < 4; ++i) paddles[i] = tia.paddle_cycles[i];
  tia = Tia{};
  for (int i = 0; i < 4; ++i) tia.paddle_cycles[i] = paddles[i];
  for (int i = 0; i < 2; ++i) tia.fire[i] = fire[i];
  tia.hmove_cycle = tia.vsync_cycle = tia.discharged_cycle = kLongAgo;
}

// Whether an HMOVE has anything to move: many programs strobe it in every line.
HD inline bool has_motion(const Tia& tia) {
  int any = tia.without_first[0] | tia.without_first[1] | tia.shaking;
  for (const uint8_t motion : tia.motion) any |= motion;
  return any != 0;
}

// How an HMOVE in cycle `cycle` of a line moves objects to the right: by what HMxx says less `late`, between two limits.
struct Move {
  int late, least, most;

  HD int distance(uint8_t motion) const {
    const int moved = -(static_cast<int8_t>(motion) >> 4) - late;
    return moved < least ? least : moved > most ? most : moved;
  }
};
HD inline Move move_at(int cycle) {
  const int step = cycle == 75 ? -1 : (3 * cycle + 1) / 4;
  if (cycle <= 20 || cycle == 75) return {0, step - 9, 8};
  if (cycle <= 53) return {0, 0, 0};
  return {step - 47, -64, 0};
}

// Where RESMx and RESBL put their object: right behind an HMOVE it may still be on its way.
HD inline int strobe_position(int object, int hpos, int clocks_since_hmove) {
  const int since = clocks_since_hmove;
  if (object == kM0 && since == 60 && hpos == 69) return 8;
  if (object == kM1 && since == 9 && hpos == 18) return 3;
  if (object == kBL) {
    if (since == 9 && hpos == 18) return 3;
    if (since == 18 && hpos == 27) return 5;
    if (since == 21 && hpos == 30) return 6;
    if (since == 54 && (hpos == 60 || hpos == 69)) return 10;
  }
  return hpos < kBlankClocks ? 2 : (hpos - 64) % kWidth;
}

// The registers, a bit for each, where a second write of the same value changes nothing, or for GRP nothing but the
// delayed graphics. NUSIZ is not among them: it ends what RESP has begun.
constexpr uint64_t repeatable_registers() {
  constexpr Register kRanges[][2] = {{kVblank, kVblank}, {kColup0, kPf2}, {kAudc0, kResmp1}};  // first, last
  uint64_t registers = 0;
  for (const auto& range : kRanges) {
    for (int which = range[0]; which <= range[1]; ++which) registers |= 1ull << which;
  }
  return registers;
}
constexpr uint64_t kRepeatable = repeatable_registers();

HD inline bool is_repeated(const Tia& tia, int address, uint8_t value) {
  const int which = register_of(address);
  if (!(kRepeatable >> which & 1) || tia.written[which] != value) return false;
  if (which == kCtrlpf) return tia.mirrored == (value & 1);
  if (which == kGrp0) return tia.old_graphics[1] == tia.graphics[1];
  if (which == kGrp1) return tia.old_graphics[0] == tia.graphics[0] && tia.old_ball_on == tia.ball_on;
  return true;
}

// Pixels of a player in one of the eight modes of NUSIZ.
HD inline int player_width(int mode) { return mode == 5 ? 16 : mode == 7 ? 32 : 8; }

// How many clocks after the end of `cycle` a write shows. PF0 to PF2 show from the next cell of 4 pixels on.
HD inline int write_delay(int address, int cycle) {
  const int which = register_of(address);
  if (which == kNusiz0 || which == kNusiz1 || which == kResm0 || which == kResm1) return 8;
  if (which == kVblank || which == kRefp0 || which == kRefp1 || which == kGrp0 || which == kGrp1) return 1;
  if (which < kPf0 || which > kPf2) return 0;
  const int pixel = 3 * (cycle % kLineCycles) - kBlankClocks;
  return ((pixel + 5) & ~3) - pixel;
}

// Does a write that only concerns what the next HMOVE does; returns whether it was one.
HD inline bool write_motion(Tia& tia, int address, uint8_t value) {
  const int which = register_of(address);
  if (which == kHmclr) {
    for (int i = 0; i < 5; ++i) tia.motion[i] = tia.written[kHmp0 + i] = 0;
    return true;
  }
  if (which < kHmp0 || which > kHmbl || which == kHmm0) return false;  // HMM0 may begin to shake missile 0
  tia.written[which] = value;
  tia.motion[which - kHmp0] = value & 0xF0;
  return true;
}

// A write at the end of `cycle`. Each function does those of one group of registers; `i` is the place in the group.
struct RegisterWrite {
  Tia& tia;
  const TiaSettings& settings;
  const Canvas& canvas;
  const int cycle;
  const uint8_t value;

  HD int column() const { return static_cast<int>(static_cast<uint32_t>(cycle) % kLineCycles); }  // 0 to 75
  HD int row() const { return cycle / kLineCycles - settings.first_line; }

  // A write shows `delay` clocks later. `finish` draws all that comes before; `change` keeps what one object has shown.
  HD void finish(int delay) const { draw_to(tia, settings, canvas, 3 * cycle + delay); }
  HD void change(int object, int delay) const {
    const int clock = 3 * cycle + delay;
    if (has_undrawn(tia, clock)) keep(tia, settings, canvas, object, clock);
  }
  // REFP, ENAM, ENABL and VDEL: of the value they keep one bit, which changes what one object shows.
  HD ALWAYS_INLINE void set_bit(uint8_t& kept, uint8_t bit, int object, int delay) const {
    if (kept == (value & bit)) return;
    change(object, delay);
    kept = value & bit;
    place_object(tia, object);
  }

  HD ALWAYS_INLINE void vsync() const {
    if (value & 2) {
      tia.vsync_cycle = cycle;
      tia.vsync = 2;
    } else if ((tia.vsync & 2) && cycle - tia.vsync_cycle >= kLineCycles) {  // earlier it only waits for the next write
      tia.frame_over = 1;
      tia.vsync = 0;
    }
  }

  HD ALWAYS_INLINE void vblank() const {
    if ((tia.vblank ^ value) & 2) {
      finish(1);
      tia.news = kNewMasks;
    }
    if ((tia.vblank & 0x80) && !(value & 0x80)) tia.discharged_cycle = cycle;
    tia.vblank = value;
  }

  HD ALWAYS_INLINE void nusiz(int i) const {
    if (tia.size[i] == value && !tia.without_first[i] && !(i == 0 && tia.shake_shape)) return;
    change(kP0 + i, 8);
    change(kM0 + i, 8);
    tia.size[i] = value;
    tia.without_first[i] = 0;
    if (i == 0) tia.shake_shape = 0;
    place_player(tia, i);
    place_missile(tia, i);
  }

  HD ALWAYS_INLINE void color(int i) const {
    uint8_t& color = tia.color[i];
    if (color == (value & 0xFE)) return;
    if (canvas.pixels) finish(0);  // no color collides
    color = value & 0xFE;
    if (tia.news == kNoNews) tia.news = kNewColors;
  }

  HD ALWAYS_INLINE void ctrlpf() const {
    if (tia.control == value && tia.mirrored == (value & 1)) return;
    if ((tia.control ^ value) & 6) {
      finish(0);
    } else {
      change(kPF, 0);
      change(kBL, 0);
    }
    tia.control = value;
    tia.news = kNewMasks;
    if (tia.mirrored != (value & 1)) {
      if (3 * column() - kBlankClocks < 79) {
        tia.mirrored = value & 1;
        place_playfield(tia);
      } else {
        tia.line_work = 1;
      }
    }
    place_ball(tia);
  }

  HD ALWAYS_INLINE void playfield(int i) const {
    if (tia.playfield[i] == value) return;
    change(kPF, write_delay(kPf0, cycle));
    tia.playfield[i] = value;
    place_playfield(tia);
  }

  HD ALWAYS_INLINE void resp(int i) const {
    const int column = this->column(), hpos = 3 * column;
    const int position = hpos < kBlankClocks ? 3 : (hpos - 63) % kWidth;
    const int mode = tia.size[i] & 7;
    const int width = player_width(mode);
    bool starting = false, drawing = false;  // an old copy begins or is being drawn where the new one will be
    for (int copy = 0; copy < 3 && kCopies[mode][copy] >= 0; ++copy) {
      const int distance = (position - tia.position[i] - kCopies[mode][copy] + 2 * kWidth) % kWidth;
      starting |= distance < 4;
      drawing |= distance >= 4 && distance < 4 + width;
    }
    const int delay = drawing && !starting ? 11 : 0;
    const bool has_begun = tia.line == cycle / kLineCycles && tia.without_first[1 - i];
    change(kP0 + i, delay);
    tia.position[i] = static_cast<uint8_t>(position);
    // ALE begins a line after what is written in its cycle 0, and the first copy comes back at once. It does not where
    // the other player's delayed write has begun the line: then this player, too, loses its first copy.
    const int row = this->row();
    const bool line_begins = !has_begun && column == 0 && delay == 0 && row > 0 && row < settings.height;
    tia.without_first[i] = !starting && !line_begins;
    tia.line_work |= tia.without_first[i];
    place_player(tia, i);
  }

  // RESM0, RESM1 or RESBL, by the object.
  HD ALWAYS_INLINE void resm_or_resbl(int object) const {
    change(object, object == kBL ? 0 : 8);
    tia.position[object] = static_cast<uint8_t>(strobe_position(object, 3 * column(), 3 * (cycle - tia.hmove_cycle)));
    if (object == kM0) tia.shake_shape = 0;
    place_object(tia, object);
  }

  // Each also makes the other's delayed graphics current, GRP1 the ball's.
  HD ALWAYS_INLINE void grp(int i) const {
    if (!tia.delayed[i]) change(kP0 + i, 1);
    if (tia.delayed[1 - i]) change(kP0 + (1 - i), 1);
    if (i == 1 && tia.delayed[2]) change(kBL, 1);
    tia.graphics[i] = value;
    tia.old_graphics[1 - i] = tia.graphics[1 - i];
    if (i == 1) tia.old_ball_on = tia.ball_on;
    if (!tia.delayed[i]) place_player(tia, i);
    if (tia.delayed[1 - i]) place_player(tia, 1 - i);
    if (i == 1 && tia.delayed[2]) place_ball(tia);
  }

  // HMM0 changed from 7x to 6x, 21 cycles after an HMOVE, makes missile 0 shake (Cosmic Ark's stars).
  HD ALWAYS_INLINE void hmm0() const {
    if (tia.motion[kM0] == 0x70 && (value & 0xF0) == 0x60 && cycle - tia.hmove_cycle == 21) {
      go_on(tia, settings, canvas, 3 * cycle);
      tia.shaking = tia.line_work = 1;
      tia.shake_step = 0;
    }
    tia.motion[kM0] = value & 0xF0;
  }

  HD ALWAYS_INLINE void resmp(int i) const {
    if (tia.locked[i] == (value & 2)) return;
    change(kM0 + i, 0);
    if (tia.locked[i]) {
      const int middle = player_width(tia.size[i] & 7) / 2;
      tia.position[kM0 + i] = static_cast<uint8_t>(wrap(tia.position[i] + middle));
      if (i == 0) tia.shake_shape = 0;
    }
    tia.locked[i] = value & 2;
    place_missile(tia, i);
  }

  HD ALWAYS_INLINE void hmove() const {
    const int column = this->column();
    go_on(tia, settings, canvas, 3 * cycle);
    tia.hmove_cycle = cycle;
    if (settings.hmove_blanks && (column <= 20 || column == 75)) {
      const bool is_seen = row() >= 0 && row() < settings.height;
      (column == 75 && is_seen ? tia.blank_left_next : tia.blank_left) = tia.line_work = 1;
    }
    const Move move = move_at(column);
    if (move.distance(0) == 0 && !has_motion(tia)) return;
    tia.shake_shape = 0;
    for (int i = 0; i < 5; ++i) {
      const int distance = move.distance(tia.motion[i]);
      const bool restored = (i < 2 && tia.without_first[i]) || (i == kM0 && tia.shaking);
      if (distance == 0 && !restored) continue;
      change(i, 0);
      tia.position[i] = static_cast<uint8_t>(wrap(tia.position[i] + distance));
      if (i < kM0) tia.without_first[i] = 0;
      place_object(tia, i);
    }
    tia.shaking = 0;
  }

  HD ALWAYS_INLINE void cxclr() const {
    finish(0);
    tia.collisions = 0;
    tia.news = kNewMasks;
  }
};

// A write of `value` at the end of `cycle`. Returns the cycle in which the CPU goes on.
HD inline int write_tia(Tia& tia, const TiaSettings& settings, const Canvas& canvas, int address, uint8_t value,
                        int cycle) {
  const int which = register_of(address);
  const RegisterWrite write = {tia, settings, canvas, cycle, value};
  int next_cycle = cycle;
  if (which < kNumValueRegisters) tia.written[which] = value;
  // clang-format off
  switch (which) {
    case kVsync: write.vsync(); break;
    case kVblank: write.vblank(); break;
    case kWsync: next_cycle += (kLineCycles - write.column()) % kLineCycles; break;
    case kNusiz0:
    case kNusiz1: write.nusiz(which - kNusiz0); break;
    case kColup0:
    case kColup1:
    case kColupf:
    case kColubk: write.color(which - kColup0); break;
    case kCtrlpf: write.ctrlpf(); break;
    case kRefp0:
    case kRefp1: write.set_bit(tia.reflected[which - kRefp0], 8, kP0 + which - kRefp0, 1); break;
    case kPf0:
    case kPf1:
    case kPf2: write.playfield(which - kPf0); break;
    case kResp0:
    case kResp1: write.resp(which - kResp0); break;
    case kResm0:
    case kResm1:
    case kResbl: write.resm_or_resbl(kM0 + which - kResm0); break;
    case kGrp0:
    case kGrp1: write.grp(which - kGrp0); break;
    case kEnam0:
    case kEnam1: write.set_bit(tia.missile_on[which - kEnam0], 2, kM0 + which - kEnam0, 0); break;
    case kEnabl: write.set_bit(tia.ball_on, 2, kBL, 0); break;
    case kHmm0: write.hmm0(); break;
    case kHmp0:
    case kHmp1:
    case kHmm1:
    case kHmbl:
    case kHmclr: write_motion(tia, address, value); break;
    case kVdelp0:
    case kVdelp1: write.set_bit(tia.delayed[which - kVdelp0], 1, kP0 + which - kVdelp0, 0); break;
    case kVdelbl: write.set_bit(tia.delayed[2], 1, kBL, 0); break;
    case kResmp0:
    case kResmp1: write.resmp(which - kResmp0); break;
    case kHmove: write.hmove(); break;
    case kCxclr: write.cxclr(); break;
    default: break;  // RSYNC and sound
  }
  // clang-format on
  if (cycle >= (settings.line_limit + 1) * kLineCycles) tia.frame_over = 1;
  return next_cycle;
}

// `undriven`: the byte that was last on the data bus; it shows in the bits that the TIA does not drive.
HD inline uint8_t read_tia(Tia& tia, const TiaSettings& settings, const Canvas& canvas, int address, int cycle,
                    uint8_t undriven) {
  // clang-format off
  constexpr uint16_t kCollisions[8][2] = {  // CXM0P to CXPPMM: bit 7, bit 6
      {pair(kP1, kM0), pair(kP0, kM0)}, {pair(kP0, kM1), pair(kP1, kM1)}, {pair(kP0, kPF), pair(kP0, kBL)},
      {pair(kP1, kPF), pair(kP1, kBL)}, {pair(kM0, kPF), pair(kM0, kBL)}, {pair(kM1, kPF), pair(kM1, kBL)},
      {pair(kBL, kPF), 0},              {pair(kP0, kP1), pair(kM0, kM1)}};
  // clang-format on
  const uint8_t low = undriven & 0x3F;
  const int which = address & 15;
  if (which < kInpt0) {
    const int wanted = kCollisions[which][0] | kCollisions[which][1];
    if (kTables.pairs[present_objects(tia)] & ~tia.collisions & wanted) draw_to(tia, settings, canvas, 3 * cycle);
    return static_cast<uint8_t>((tia.collisions & kCollisions[which][0] ? 0x80 : 0) |
                                (tia.collisions & kCollisions[which][1] ? 0x40 : 0) | low);
  }
  if (which < kInpt4) {
    // One that was charged before this frame began reads 0 again, as in ALE.
    const int paddle = tia.paddle_cycles[which - kInpt0], charged_cycle = tia.discharged_cycle + paddle;
    const bool charged = !(tia.vblank & 0x80) && paddle >= 0 && cycle > charged_cycle && (charged_cycle >= 0 || paddle == 0);
    return (charged ? 0x80 : 0) | low;
  }
  if (which <= kInpt5) return tia.fire[which - kInpt4] | low;
  return low;
}

// Moves the origin of time forward by `lines`, and returns them in cycles.
HD inline int rebase(Tia& tia, int lines) {
  const int cycles = lines * kLineCycles;
  const auto back = [cycles](int cycle) { return cycle - cycles < kLongAgo ? kLongAgo : cycle - cycles; };
  tia.hmove_cycle = back(tia.hmove_cycle);
  tia.vsync_cycle = back(tia.vsync_cycle);
  tia.discharged_cycle = tia.discharged_cycle - cycles < -(1 << 28) ? -(1 << 28) : tia.discharged_cycle - cycles;
  tia.line = static_cast<int16_t>(tia.line < lines ? 0 : tia.line - lines);
  return cycles;
}

}  // namespace beast::atari
