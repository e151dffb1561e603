// The kernels of batch.h on a CPU, a loop over their threads: what tests compare with a pool.
#pragma once

#include <vector>

#include "starts.h"

namespace beast::atari {

class SimulatedBatch {
 public:
  // `is_exact`: the generators are ALE's. `is_reversed`: threads run in the opposite order, which must change nothing.
  SimulatedBatch(const Rom& rom, const EnvSettings& settings, int count, int lanes, bool is_exact, bool is_reversed)
      : rom_(rom),
        protocol_(rom_, settings, Palette{}),
        table_(rom_, protocol_, kNumResets),
        is_exact_(is_exact),
        is_reversed_(is_reversed) {
    const size_t screen = static_cast<size_t>(protocol_.rows()) * kScreenWidth, stack = protocol_.stack_bytes();
    batch_.rom = &rom_;
    batch_.starts = table_.starts();
    batch_.settings = settings;
    batch_.mean = protocol_.resizer().mean();
    batch_.rows = protocol_.resizer().rows();
    batch_.columns = protocol_.resizer().columns();
    batch_.sticky = sticky_draws(settings.sticky);
    batch_.count = count;
    batch_.lanes = lanes;
    batch_.num_actions = static_cast<int>(settings.actions.size());
    std::copy(settings.actions.begin(), settings.actions.end(), batch_.meanings);
    allocate(batch_.vcs, vcs_, count);
    allocate(batch_.vcs_before, vcs_before_, count);
    allocate(batch_.progress, progress_, count);
    allocate(batch_.progress_before, progress_before_, count);
    if (is_exact) {
      allocate_generators(exact_, exact_before_);
    } else {
      allocate_generators(small_, small_before_);
    }
    allocate(batch_.resets, resets_, count);
    allocate(batch_.pictures, pictures_, count);
    allocate(batch_.screens, screens_, 2 * count * screen);
    allocate(batch_.images, images_, count * screen);
    allocate(batch_.again, again_, count);
    batch_.num_again = &num_again_;
    allocate(batch_.stacks, stacks_, count * stack);
    if (settings.same_step) allocate(batch_.final_stacks, final_stacks_, count * stack);
    allocate(batch_.rewards, rewards_, count);
    numbers_.resize(4 * count);
    batch_.lives = numbers_.data();
    batch_.frame_numbers = batch_.lives + count;
    batch_.episode_frame_numbers = batch_.frame_numbers + count;
    batch_.errors = batch_.episode_frame_numbers + count;
    flags_.resize(3 * count);
    batch_.terminated = reinterpret_cast<bool*>(flags_.data());
    batch_.truncated = batch_.terminated + count;
    batch_.has_ended = batch_.truncated + count;
    lengths_.resize(static_cast<size_t>(kNumResets) * count);
    batch_.starts.lengths = lengths_.data();
  }
  SimulatedBatch(const SimulatedBatch&) = delete;  // batch_ has pointers into it
  SimulatedBatch& operator=(const SimulatedBatch&) = delete;

  const Batch& batch() const { return batch_; }
  const Protocol& protocol() const { return protocol_; }
  int64_t num_drawn_again() const { return num_drawn_again_; }

  void seed(const uint32_t* seeds) {
    for (int console = 0; console < batch_.count; ++console) {
      Mt19937 noops;
      noops.seed(seeds[console]);
      for (int reset = 0; reset < kNumResets; ++reset) {
        lengths_[static_cast<size_t>(reset) * batch_.count + console] =
            static_cast<uint8_t>(protocol_.draw_start_frames(noops));
      }
      if (is_exact_) {
        exact_[console] = protocol_.user_generator(seeds[console], lengths_[console]);
      } else {
        small_[console].state = seeds[console] + (static_cast<uint64_t>(console) << 32);
      }
    }
  }

  void reset(bool is_first) { is_exact_ ? reset_with<Mt19937>(is_first) : reset_with<SplitMix64>(is_first); }
  void step(const int64_t* actions) {
    batch_.actions = actions;
    is_exact_ ? step_with<Mt19937>() : step_with<SplitMix64>();
  }

 private:
  static constexpr int kNumResets = 1024;

  template <class T>
  static void allocate(T*& array, std::vector<T>& memory, size_t size) {
    memory.resize(size);
    array = memory.data();
  }
  template <class Generator>
  void allocate_generators(std::vector<Generator>& generators, std::vector<Generator>& before) {
    generators.resize(batch_.count);
    before.resize(batch_.count);
    batch_.generators = generators.data();
    batch_.generators_before = before.data();
  }

  template <class Kernel>
  void launch(int num_threads, const Kernel& kernel) const {
    for (int i = 0; i < num_threads; ++i) kernel(is_reversed_ ? num_threads - 1 - i : i);
  }
  template <class Generator>
  void reset_with(bool is_first) {
    launch(kWarpSize * num_warps(batch_), [&](int thread) { begin<Generator>(batch_, thread, is_first); });
    observe_all();
  }
  template <class Generator>
  void step_with() {
    launch(kWarpSize * num_warps(batch_), [&](int thread) { emulate<Generator>(batch_, thread); });
    num_drawn_again_ += num_again_;
    launch(batch_.count, [&](int thread) { emulate_again<Generator>(batch_, thread); });
    observe_all();
  }
  void observe_all() const {
    const int plane = batch_.settings.height * batch_.settings.width;
    launch(batch_.count * plane, [&](int thread) { observe(batch_, thread / plane, thread % plane); });
  }

  const Rom rom_;
  const Protocol protocol_;
  const StartTable table_;
  const bool is_exact_, is_reversed_;
  Batch batch_{};
  std::vector<Vcs> vcs_, vcs_before_;
  std::vector<Progress> progress_, progress_before_;
  std::vector<Mt19937> exact_, exact_before_;
  std::vector<SplitMix64> small_, small_before_;
  std::vector<uint32_t> resets_;
  std::vector<Picture> pictures_;
  std::vector<uint8_t> screens_, images_, stacks_, final_stacks_, lengths_, flags_;
  std::vector<int32_t> again_, numbers_;
  std::vector<float> rewards_;
  int32_t num_again_ = 0;
  int64_t num_drawn_again_ = 0;
};

}  // namespace beast::atari
