// Cartridges: which of a ROM's bytes the 4 KB window shows, and how a program changes it.
#pragma once

#include <stdint.h>

#include "games.h"

namespace beast::atari {

constexpr int kRomBytes = 16384;
constexpr int kHotspots = 0xFE0;  // accesses to the window from here on may switch banks

struct Rom {
  // Smaller ROMs are repeated to fill it. It is aligned because a branch sees by its pointer whether it crosses a page.
  alignas(256) uint8_t bytes[kRomBytes];
  Cart cart;
  Game game;
};

struct CartState {
  // 1 KB of ROM for each quarter of the window. FE carts look at bit 13 of the address, too: the last four are for 1.
  uint8_t quarters[8];
  uint8_t ram[128];  // F8SC, F6SC
};

// 2 KB and 4 KB: nothing to switch.
HD inline bool is_flat(Cart cart) { return cart == kCart2K || cart == kCart4K; }
HD inline bool has_cart_ram(Cart cart) { return cart == kCartF8SC || cart == kCartF6SC; }

HD inline void select_bank(CartState& state, int bank) {
  for (int i = 0; i < 8; ++i) state.quarters[i] = static_cast<uint8_t>(4 * bank + (i & 3));
}

HD inline void reset_cart(const Rom& rom, CartState& state) {
  select_bank(state, 0);
  switch (rom.cart) {
    case kCartF8:
    case kCartF8SC: select_bank(state, 1); break;
    case kCartE0:
      for (int i = 0; i < 8; ++i) state.quarters[i] = static_cast<uint8_t>(4 + (i & 3));
      break;
    case kCartFE:
      for (int i = 0; i < 4; ++i) state.quarters[i] = static_cast<uint8_t>(4 + i);
      break;
    default: break;
  }
}

// Any access to the hotspots, read or write, may switch.
HD inline void touch_cart(Cart cart, CartState& state, int address) {
  const int low = address & 0xFFF;
  switch (cart) {
    case kCartF8:
    case kCartF8SC:
      if (low == 0xFF8 || low == 0xFF9) select_bank(state, low - 0xFF8);
      break;
    case kCartF6:
    case kCartF6SC:
      if (low >= 0xFF6 && low <= 0xFF9) select_bank(state, low - 0xFF6);
      break;
    case kCartE0:
      if (low >= 0xFE0 && low <= 0xFF7) {
        const int quarter = (low >> 3) & 3;  // FE0: 0, FE8: 1, FF0: 2
        state.quarters[quarter] = state.quarters[quarter + 4] = low & 7;
      }
      break;
    default: break;
  }
}

HD inline uint8_t read_cart(const Rom& rom, CartState& state, int address) {
  const int low = address & 0xFFF;
  if (low >= kHotspots) touch_cart(rom.cart, state, address);
  if (low < 0x100 && has_cart_ram(rom.cart) && low >= 0x80) return state.ram[low & 0x7F];
  const int quarter = ((address >> 10) & 3) | ((address >> 11) & 4);
  return rom.bytes[((state.quarters[quarter] << 10) | (address & 0x3FF)) & (kRomBytes - 1)];
}

HD inline void write_cart(const Rom& rom, CartState& state, int address, uint8_t value) {
  const int low = address & 0xFFF;
  if (low >= kHotspots) touch_cart(rom.cart, state, address);
  if (low < 0x80 && has_cart_ram(rom.cart)) state.ram[low & 0x7F] = value;
}

}  // namespace beast::atari
