// libFuzzer target for the Atari emulator (csrc/atari/). Whatever a ROM or a saved state holds, the emulator stays
// within its memory and does nothing undefined, ROMs of a wrong size are refused, and every state could be saved.
//
// The input's first six bytes choose a game, what is done, where the program begins and what the player does. The rest
// is the ROM: repeated until it has the game's size, or as it is, whatever its size. Clang's sanitizers keep the jumps
// from opcode to opcode that releases have; GCC's, in csrc/tests/test_atari.cc, test the loop that replaces them.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../atari/env.h"
#include "../atari/vcs.h"

using namespace beast::atari;

namespace {

enum Kind : uint8_t { kFrames, kWrongSize, kState, kLoad, kEnvironment, kNumKinds };

void require(bool condition) {
  if (!condition) std::abort();
}

struct Input {
  const uint8_t* data;
  size_t size;

  uint8_t next() {
    if (!size) return 0;
    --size;
    return *data++;
  }
};

// Without a choice of its own a program begins where the vector among the ROM's bytes says, which few find.
std::vector<uint8_t> rom_bytes(const Game& game, const Input& program, uint8_t start) {
  const size_t size = game.cart == kCart2K ? 2048 : game.cart == kCart4K ? 4096 : 0;
  std::vector<uint8_t> bytes(size ? size : game.cart == kCartF6 || game.cart == kCartF6SC ? 16384 : 8192, 0xEA);
  for (size_t i = 0; program.size && i < bytes.size(); ++i) bytes[i] = program.data[i % program.size];
  for (size_t bank = 4096; start && bank <= bytes.size(); bank += 4096) bytes[bank - 4] = start, bytes[bank - 3] = 0xF0;
  return bytes;
}

// Objects of their own, so that the sanitizer sees an overrun of each.
struct Console {
  const std::unique_ptr<Rom> rom = std::make_unique<Rom>();
  const std::unique_ptr<Vcs> vcs = std::make_unique<Vcs>();
  const std::unique_ptr<Generators> generators = std::make_unique<Generators>();
  std::vector<uint8_t> pixels;
  uint8_t player;

  void play(int frames) {
    const ScreenOutput gray{{pixels.data(), rom->game.height, true}}, indices{{pixels.data(), rom->game.height, false}};
    for (int i = 0; i < frames; ++i) {
      player = static_cast<uint8_t>(5 * player + 3);
      const int action = player % kNumActions;
      vcs->tally.over = 0;
      switch (player >> 6) {
        case 0: act(*rom, *vcs, generators->user, action, 0, NoOutput{}); break;
        case 1: act(*rom, *vcs, generators->user, action, sticky_draws(0.25), gray); break;
        default: act(*rom, *vcs, generators->user, action, 0, indices); break;
      }
      require(is_valid(*vcs) && is_valid(*generators));
    }
  }
};

void play_in_environment(const Rom& rom, uint8_t player) {
  EnvSettings settings;
  settings.actions = {0, 1, 2, 3, 4, 5};
  settings.fire_reset = player & 16;
  settings.noop_max = player & 32 ? 2 : 0;
  settings.same_step = player & 1;
  settings.grayscale = !(player & 2);
  settings.keeps_rgb = player & 4;
  settings.episodic_life = player & 8;
  settings.max_frames = 20;
  const Protocol protocol(rom, settings, Palette{});
  const auto state = std::make_unique<EnvState>(), before = std::make_unique<EnvState>();
  std::vector<uint8_t> rgb(protocol.rgb_bytes()), stack(protocol.stack_bytes());
  std::vector<uint8_t> observation(protocol.stack_bytes()), final_observation(protocol.stack_bytes());
  const Env env{state.get(), before.get(), rgb.data(), stack.data()};
  Protocol::Scratch scratch = protocol.make_scratch();
  protocol.reset(env, player, scratch);
  for (int step = 0; step < 6; ++step) {
    protocol.step(env, (player + step) % 6, settings.same_step ? final_observation.data() : nullptr, scratch);
    protocol.observe(env, observation.data());
    require(is_valid(state->vcs) && is_valid(state->generators));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input{data, size};
  const Game& game = kGames[input.next() % kNumGames];
  const auto kind = static_cast<Kind>(input.next() % kNumKinds);
  const uint8_t frames = input.next(), start = input.next(), player = input.next(), changes = input.next();

  Console console;
  console.player = player;
  if (kind == kWrongSize) {
    const std::vector<uint8_t> exact(input.data, input.data + input.size);
    const bool is_rom = make_rom(*console.rom, exact.data(), static_cast<int>(exact.size()), game.name);
    require(is_rom == (exact.size() == rom_bytes(game, input, 0).size()));
    require(!make_rom(*console.rom, exact.data(), static_cast<int>(exact.size()), ""));
    if (!is_rom) return 0;
  } else {
    if (kind == kState && input.size < changes) return 0;
    Input program = input;
    if (kind == kState) program.data += changes, program.size -= changes;
    const std::vector<uint8_t> bytes = rom_bytes(game, program, start);
    require(make_rom(*console.rom, bytes.data(), static_cast<int>(bytes.size()), game.name));
  }
  if (kind == kEnvironment && frames % 8 == 0) {  // as expensive as a hundred of the others
    play_in_environment(*console.rom, player);
    return 0;
  }

  console.pixels.resize(static_cast<size_t>(game.height) * kScreenWidth);
  Vcs& vcs = *console.vcs;
  std::memset(static_cast<void*>(&vcs), 0, sizeof(vcs));
  console.generators->system.seed(kSystemSeed);
  console.generators->user.seed(player);
  if (kind == kLoad && frames % 8 == 0) {
    load(*console.rom, vcs, *console.generators, player, ScreenOutput{{console.pixels.data(), game.height, true}});
  } else {
    vcs.tally = start_tally(game);
    vcs.paddle = paddle_middle(game);
    reset_system(*console.rom, vcs, *console.generators);
  }
  console.play(1 + frames % 3);
  if (kind == kState) {
    unsigned char changed[sizeof(Vcs)];
    std::memcpy(changed, &vcs, sizeof(changed));
    for (int i = 0; i + 2 < changes; i += 3) {
      changed[(input.data[i] | input.data[i + 1] << 8) % sizeof(changed)] = input.data[i + 2];
    }
    Vcs state;
    std::memcpy(static_cast<void*>(&state), changed, sizeof(state));
    if (!is_valid(state)) return 0;
    vcs = state;
    vcs.error = kNoError;
    console.play(3);
  }
  return 0;
}
