// The host's half of a batch (batch.h): which arrays it needs, what they begin with, and its kernels as loops over
// their threads. beast/gpu/atari.py allocates the arrays on a device and launches the kernels there; on a CPU it calls
// `run`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "starts.h"

namespace beast::atari {

// An array of a batch. Those with contents are constants of its game; all others begin with zeros.
struct BatchArray {
  const char* name;
  size_t bytes;
  const void* contents;
};

// A game and its settings: what all batches of them share.
class BatchGame {
 public:
  static constexpr int kNumResets = 1024;

  // `is_exact`: the generators are ALE's. Throws std::invalid_argument as StartTable does.
  BatchGame(const Rom& rom, const EnvSettings& settings, bool is_exact)
      : rom_(rom), protocol_(rom_, settings, Palette{}), table_(rom_, protocol_, kNumResets), is_exact_(is_exact) {}
  BatchGame(const BatchGame&) = delete;  // its parts refer to each other
  BatchGame& operator=(const BatchGame&) = delete;

  const Rom& rom() const { return rom_; }
  const Protocol& protocol() const { return protocol_; }
  const StartTable& table() const { return table_; }
  bool is_exact() const { return is_exact_; }
  size_t generator_bytes() const { return is_exact_ ? sizeof(Mt19937) : sizeof(SplitMix64); }

  void describe(uint32_t* layout) const {
    is_exact_ ? atari::describe<Mt19937>(layout) : atari::describe<SplitMix64>(layout);
  }

  // What a console that begins with this seed has: the start frames of its episodes [kNumResets], and its generator.
  void seed(uint32_t seed, uint8_t* lengths, uint8_t* generator) const {
    Mt19937 noops;
    noops.seed(seed);
    for (int reset = 0; reset < kNumResets; ++reset) {
      lengths[reset] = static_cast<uint8_t>(protocol_.draw_start_frames(noops));
    }
    if (is_exact_) {
      const Mt19937 user = protocol_.user_generator(seed, lengths[0]);
      std::memcpy(generator, &user, sizeof(user));
    } else {
      const SplitMix64 user = {seed};
      std::memcpy(generator, &user, sizeof(user));
    }
  }

 private:
  const Rom rom_;
  const Protocol protocol_;
  const StartTable table_;
  const bool is_exact_;
};

// One batch of it.
class HostBatch {
 public:
  HostBatch(std::shared_ptr<const BatchGame> game, int count, int lanes) : game_(std::move(game)) {
    const EnvSettings& settings = game_->protocol().settings();
    batch_.starts = game_->table().starts();
    batch_.settings = settings;
    batch_.mean = game_->protocol().resizer().mean();
    batch_.sticky = sticky_draws(settings.sticky);
    batch_.count = count;
    batch_.lanes = lanes;
    batch_.num_actions = static_cast<int>(settings.actions.size());
    std::copy(settings.actions.begin(), settings.actions.end(), batch_.meanings);
  }

  std::vector<BatchArray> arrays() const {
    std::vector<BatchArray> found;
    Batch batch = batch_;
    for_each_array(batch, [&](const char* name, auto& array, size_t size, const void* contents = nullptr) {
      found.push_back({name, size * sizeof(*array), contents});
    });
    return found;
  }

  // Says where the arrays lie, in the order of arrays(), each aligned to 256 bytes. Returns what kernels get.
  const Batch& place(const std::vector<uintptr_t>& addresses) {
    size_t k = 0;
    for_each_array(batch_, [&](const char* name, auto& array, size_t, const void* = nullptr) {
      const uintptr_t address = addresses.at(k++);
      if (address % alignof(std::remove_reference_t<decltype(*array)>)) {
        throw std::invalid_argument(std::string("the array ") + name + " is not aligned");
      }
      array = reinterpret_cast<std::decay_t<decltype(array)>>(address);
    });
    is_placed_ = true;
    return batch_;
  }

  // Runs a kernel of batch.cu in this thread; "emulate_again" is emulate with `is_again`. `is_reversed`: its threads in
  // the opposite order, which changes nothing.
  void run(const std::string& kernel, bool is_reversed) const {
    if (!is_placed_) throw std::logic_error("the batch's arrays have no place yet");
    game_->is_exact() ? run_with<Mt19937>(kernel, is_reversed) : run_with<SplitMix64>(kernel, is_reversed);
  }

 private:
  // Calls visit(name, pointer, number of elements[, contents]) for each array of a batch.
  template <class Visit>
  void for_each_array(Batch& batch, const Visit& visit) const {
    const Protocol& protocol = game_->protocol();
    const size_t count = batch.count, screen = static_cast<size_t>(protocol.rows()) * kScreenWidth;
    const size_t num_starts = game_->table().num_starts();
    const Starts starts = game_->table().starts();
    visit("rom", batch.rom, 1, &game_->rom());
    visit("start_states", batch.starts.states, num_starts, starts.states);
    visit("start_images", batch.starts.images, num_starts * screen, starts.images);
    visit("start_rows", batch.starts.rows, BatchGame::kNumResets, starts.rows);
    visit("start_lengths", batch.starts.lengths, BatchGame::kNumResets * count);
    const auto visit_axis = [&](const char* taps, const char* weights, const char* float_weights, AreaAxis& area,
                                const Axis& axis) {
      visit(taps, area.taps, axis.taps.size(), axis.taps.data());
      visit(weights, area.weights, axis.weights.size(), axis.weights.data());
      visit(float_weights, area.float_weights, axis.float_weights.size(), axis.float_weights.data());
    };
    const Resizer& resizer = protocol.resizer();
    visit_axis("row_taps", "row_weights", "row_float_weights", batch.rows, resizer.rows());
    visit_axis("column_taps", "column_weights", "column_float_weights", batch.columns, resizer.columns());
    visit("vcs", batch.vcs, count);
    visit("vcs_before", batch.vcs_before, count);
    visit("progress", batch.progress, count);
    visit("progress_before", batch.progress_before, count);
    visit("generators", batch.generators, count * game_->generator_bytes());
    visit("generators_before", batch.generators_before, count * game_->generator_bytes());
    visit("resets", batch.resets, count);
    visit("begins", batch.begins, count);
    visit("has_ended", batch.has_ended, count);
    visit("pictures", batch.pictures, count);
    visit("screens", batch.screens, 2 * count * screen);
    visit("images", batch.images, count * screen);
    visit("again", batch.again, count);
    visit("num_again", batch.num_again, 1);
    visit("actions", batch.actions, count);
    visit("stacks", batch.stacks, count * protocol.stack_bytes());
    if (batch.settings.same_step) visit("final_stacks", batch.final_stacks, count * protocol.stack_bytes());
    visit("rewards", batch.rewards, count);
    visit("lives", batch.lives, count);
    visit("frame_numbers", batch.frame_numbers, count);
    visit("episode_frame_numbers", batch.episode_frame_numbers, count);
    visit("errors", batch.errors, count);
    visit("terminated", batch.terminated, count);
    visit("truncated", batch.truncated, count);
  }

  template <class Generator>
  void run_with(const std::string& kernel, bool is_reversed) const {
    const auto for_each_thread = [is_reversed](size_t num_threads, const auto& body) {
      for (size_t i = 0; i < num_threads; ++i) body(is_reversed ? num_threads - 1 - i : i);
    };
    const size_t in_warps = kWarpSize * num_warps(batch_), plane = batch_.settings.height * batch_.settings.width;
    if (kernel == "begin") {
      for_each_thread(in_warps, [&](size_t thread) { begin<Generator>(batch_, static_cast<int>(thread)); });
    } else if (kernel == "emulate") {
      for_each_thread(in_warps, [&](size_t thread) { emulate<Generator>(batch_, static_cast<int>(thread), false); });
    } else if (kernel == "emulate_again") {
      for_each_thread(batch_.count, [&](size_t thread) { emulate<Generator>(batch_, static_cast<int>(thread), true); });
    } else if (kernel == "observe") {
      for_each_thread(batch_.count * plane, [&](size_t thread) {
        observe(batch_, static_cast<int>(thread / plane), static_cast<int>(thread % plane));
      });
    } else {
      throw std::invalid_argument("there is no kernel " + kernel);
    }
  }

  const std::shared_ptr<const BatchGame> game_;
  bool is_placed_ = false;
  Batch batch_{};
};

}  // namespace beast::atari
