// The Python module `libatari`: an Atari 2600 emulator that needs neither gRPC nor torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "build_check.h"
#include "env.h"

namespace py = pybind11;

namespace beast::atari {

void bind_pool(py::module_& module);   // pool_module.cc
void bind_batch(py::module_& module);  // batch_module.cc

namespace {

// One console, for tests and tools.
class Console {
 public:
  Console(const std::string& rom, const std::string& game, uint32_t seed, double sticky) {
    if (!make_rom(rom_, reinterpret_cast<const uint8_t*>(rom.data()), static_cast<int>(rom.size()), game.c_str())) {
      throw std::invalid_argument("no game \"" + game + "\" with a ROM of " + std::to_string(rom.size()) + " bytes");
    }
    if (!(sticky >= 0 && sticky <= 1)) {
      throw std::invalid_argument("sticky is " + std::to_string(sticky) + ": it must lie between 0 and 1");
    }
    sticky_ = sticky_draws(sticky);
    state_.rom = hash(rom_.bytes, sizeof rom_.bytes);
    load(rom_, state_.vcs, state_.generators, seed, output(), sticky_);
  }

  int act(int action) {
    if (action < 0 || action >= kNumActions) {
      throw std::out_of_range("action " + std::to_string(action) + " is not in 0.." + std::to_string(kNumActions - 1));
    }
    return atari::act(rom_, state_.vcs, state_.generators.user, action, sticky_, output());
  }

  // Frames for benchmarks, without a picture or with luminances, in which screen() is of no use. Returns the sum of
  // rewards; resets at the end of a game.
  int64_t run(int64_t frames, bool gray, py::bytes actions) {
    const std::string_view sequence = actions;
    if (sequence.empty()) throw std::invalid_argument("no actions: give a byte for each");
    int64_t total = 0;
    const ScreenOutput output{{state_.pixels[0], kMaxScreenHeight, true}};
    for (int64_t i = 0; i < frames; ++i) {
      const int action = static_cast<uint8_t>(sequence[static_cast<size_t>(i) % sequence.size()]) % kNumActions;
      total += gray ? atari::act(rom_, state_.vcs, state_.generators.user, action, sticky_, output)
                    : atari::act(rom_, state_.vcs, state_.generators.user, action, sticky_, NoOutput{});
      if (game_over(state_.vcs)) atari::reset_game(rom_, state_.vcs, state_.generators, NoOutput{}, sticky_);
    }
    return total;
  }

  void reset_game() {
    memset(state_.pixels, 0, sizeof state_.pixels);
    state_.current = 0;
    atari::reset_game(rom_, state_.vcs, state_.generators, output(), sticky_);
  }

  py::array_t<uint8_t> ram() const { return py::array_t<uint8_t>(128, state_.vcs.ram); }
  py::array_t<uint8_t> screen() const {
    return py::array_t<uint8_t>({static_cast<int>(rom_.game.height), kScreenWidth},
                                state_.pixels[state_.current]);
  }
  void set_ram(int address, int value) {
    if (address < 0 || address > 255 || value < 0 || value > 255) {
      throw std::out_of_range("RAM has addresses 128..255, or 0..127, and values 0..255, not " +
                              std::to_string(address) + " and " + std::to_string(value));
    }
    state_.vcs.ram[address & 0x7F] = static_cast<uint8_t>(value);
  }
  const Vcs& vcs() const { return state_.vcs; }

  py::bytes save() const { return py::bytes(reinterpret_cast<const char*>(&state_), sizeof state_); }
  void restore(const std::string& bytes) {
    if (bytes.size() != sizeof state_) {
      throw std::invalid_argument("a saved state has " + std::to_string(sizeof state_) + " bytes, not " +
                                  std::to_string(bytes.size()));
    }
    State state;
    memcpy(static_cast<void*>(&state), bytes.data(), sizeof state);
    if (!is_valid(state.vcs) || !is_valid(state.generators) || state.current < 0 || state.current > 1) {
      throw std::invalid_argument("these bytes are not a saved state");
    }
    if (state.rom != state_.rom) {
      throw std::invalid_argument("this state is of another ROM: restore it in a console of that one");
    }
    state_ = state;
  }

 private:
  struct State {
    Vcs vcs;
    Generators generators;
    uint8_t pixels[2][kMaxScreenHeight * kScreenWidth];
    int current;   // the screen of the newest frame
    uint64_t rom;  // hash of its bytes
  };

  AlternatingOutput output() {
    return {{state_.pixels[0], state_.pixels[1]}, kMaxScreenHeight, false, &state_.current};
  }

  Rom rom_;
  State state_{};
  uint64_t sticky_ = 0;
};

py::list games() {
  py::list all;
  for (const Game& game : kGames) {
    py::dict row;
    row["name"] = game.name;
    row["md5"] = game.md5;
    constexpr const char* kWirings[] = {"kFlat", "kBanked", "kSliced"};
    row["wiring"] = kWirings[wiring_of(game.cart)];
    row["height"] = static_cast<int>(game.height);
    row["is_pal"] = game.has(kPal);
    row["has_rules"] = game.rules != kNoRules;
    row["is_exact"] = game.is_exact();
    row["cart"] = static_cast<int>(game.cart);
    py::list actions;
    for (int i = 0; i < kNumActions; ++i) {
      if (game.actions >> i & 1) actions.append(i);
    }
    row["actions"] = actions;
    const ModeScript& script = game.script;
    py::dict mode;  // the bytes of RAM that a reset waits for
    if (script.frames) mode[py::int_(script.address)] = script.value;
    if (script.other_address) mode[py::int_(script.other_address)] = script.other_value;
    row["mode"] = mode;
    all.append(row);
  }
  return all;
}

}  // namespace
}  // namespace beast::atari

PYBIND11_MODULE(libatari, module) {
  using namespace beast::atari;
  check_build();
  py::class_<Console>(module, "Console")
      .def(py::init([](const py::bytes& rom, const std::string& game, uint32_t seed, double sticky) {
             return new Console(rom, game, seed, sticky);
           }),
           py::arg("rom"), py::arg("game"), py::arg("seed"), py::arg("sticky") = 0.0)
      .def("act", &Console::act, py::arg("action"))
      .def("run", &Console::run, py::arg("frames"), py::arg("gray"), py::arg("actions"))
      .def("reset_game", &Console::reset_game)
      .def("ram", &Console::ram)
      .def("set_ram", &Console::set_ram)
      .def("screen", &Console::screen)
      .def("save", &Console::save)
      .def("restore", [](Console& console, const py::bytes& state) { console.restore(state); })
      .def_property_readonly("lives", [](const Console& console) { return lives(console.vcs()); })
      .def_property_readonly("game_over", [](const Console& console) { return game_over(console.vcs()); })
      .def_property_readonly("error", [](const Console& console) { return static_cast<int>(console.vcs().error); })
      .def_property_readonly("frame_number", [](const Console& console) { return console.vcs().frame_number; })
      .def_property_readonly("episode_frame_number",
                             [](const Console& console) { return console.vcs().episode_frame_number; });
  bind_pool(module);
  bind_batch(module);
  module.def("games", &games, "All games that the emulator knows, as dicts.");
}
