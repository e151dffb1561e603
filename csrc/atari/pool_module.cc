// The class `Pool` of the Python module: many environments of one game. beast/envs/emulator.py is its user.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "from_python.h"
#include "pool.h"

namespace beast::atari {

namespace {

Palette palette_of(const Array<uint8_t>& colors) {
  Palette palette;
  if (colors.size() == 0) return palette;
  if (colors.ndim() != 2 || colors.shape(0) != 256 || colors.shape(1) != 4) {
    throw std::invalid_argument("the palette is no array [256, 4] of red, green, blue and gray");
  }
  for (int i = 0; i < 256; ++i) {
    for (int c = 0; c < 3; ++c) palette.rgb[i][c] = colors.at(i, c);
    palette.gray[i] = colors.at(i, 3);
  }
  return palette;
}

// A pool, the arrays that its job writes into, and the checks of what comes from Python.
class PythonPool {
 public:
  PythonPool(const std::string& rom, const std::string& game, int num_envs, int num_threads,
             const Array<uint8_t>& palette, const EnvSettings& settings) {
    check(num_envs, 1, 1 << 20, "num_envs");
    check(num_threads, 1, 1024, "num_threads");
    const Rom made = rom_of(rom, game);
    const Palette colors = palette_of(palette);
    py::gil_scoped_release release;
    pool_ = std::make_unique<Pool>(made, settings, colors, num_envs, num_threads);
  }

  ~PythonPool() {
    if (pool_ && pool_->lost_threads()) {
      pool_.release();  // in a forked child nobody could be joined
    } else if (is_running_) {
      pool_->wait();
    }
  }

  Pool& pool() { return *pool_; }

  // `actions_or_seeds`: one for each of `ids` (kStep, kSeededReset), else empty. `numbers` is an int32 array
  // [5, n] of rewards, lives, frame numbers, frame numbers of the episodes and errors; `flags` a bool array [2, n] of
  // terminated and truncated.
  void prepare(Job::Kind kind, const Array<int32_t>& ids, const Array<int64_t>& actions_or_seeds,
               py::array observations, py::object final_observations, Array<int32_t> numbers, Array<bool> flags) {
    refuse_while_running();
    refuse_in_fork();
    Job& job = pool_->job();
    const py::ssize_t n = ids.size();
    const bool has_each = kind != Job::Kind::kReset;
    if (ids.ndim() != 1 || (has_each && (actions_or_seeds.ndim() != 1 || actions_or_seeds.size() != n))) {
      throw std::invalid_argument(std::to_string(actions_or_seeds.size()) + " actions or seeds for " +
                                  std::to_string(n) + " environments");
    }
    if (numbers.size() != 5 * n || flags.size() != 2 * n) throw std::invalid_argument("arrays of another width");
    job.kind = kind;
    job.ids.assign(ids.data(), ids.data() + n);
    job.actions.resize(n);
    job.seeds.resize(n);
    std::vector<bool> seen(pool_->num_envs());
    const int64_t num_actions = static_cast<int64_t>(pool_->protocol().settings().actions.size());
    for (py::ssize_t k = 0; k < n; ++k) {
      const int32_t id = checked(job.ids[k]);
      if (seen[id]) throw std::invalid_argument("environment " + std::to_string(id) + " is named twice");
      seen[id] = true;
      if (kind != Job::Kind::kSeededReset && !pool_->was_reset(id)) {
        throw std::runtime_error("environment " + std::to_string(id) + " was never reset: call reset() first");
      }
      if (kind == Job::Kind::kStep) {
        if (actions_or_seeds.at(k) < 0 || actions_or_seeds.at(k) >= num_actions) {
          throw std::invalid_argument("action " + std::to_string(actions_or_seeds.at(k)) + " of environment " +
                                      std::to_string(id) + " is none of " + std::to_string(num_actions) +
                                      ": give an index from 0 to " + std::to_string(num_actions - 1) +
                                      " into get_action_set()");
        }
        job.actions[k] = static_cast<int32_t>(actions_or_seeds.at(k));
      } else if (has_each) {
        job.seeds[k] = static_cast<uint32_t>(actions_or_seeds.at(k));
      }
    }
    job.observation_stride = check_observations(observations, n);
    job.observations = static_cast<uint8_t*>(observations.mutable_data());
    job.final_observations = nullptr;
    if (!final_observations.is_none()) {
      py::array array = py::reinterpret_borrow<py::array>(final_observations);
      if (check_observations(array, n) != pool_->protocol().stack_bytes()) {
        throw std::invalid_argument("the array of final observations is not contiguous");
      }
      job.final_observations = static_cast<uint8_t*>(array.mutable_data());
    } else if (pool_->protocol().settings().same_step) {
      throw std::invalid_argument("under SAME_STEP there must be an array for final observations");
    }
    int32_t* rows = numbers.mutable_data();
    job.rewards = rows;
    job.lives = rows + n;
    job.frame_numbers = rows + 2 * n;
    job.episode_frame_numbers = rows + 3 * n;
    job.errors = rows + 4 * n;
    job.terminated = flags.mutable_data();
    job.truncated = job.terminated + n;
    kept_ = py::make_tuple(observations, final_observations, numbers, flags);
  }

  // Other Python threads run meanwhile. What they call on this pool raises.
  void run() {
    is_busy_ = true;
    {
      py::gil_scoped_release release;
      pool_->run();
    }
    is_busy_ = false;
  }

  void start() {
    pool_->start();
    is_running_ = true;
  }

  void wait() {
    if (is_busy_) refuse_while_running();
    if (!is_running_) return;
    refuse_in_fork();
    is_busy_ = true;
    {
      py::gil_scoped_release release;
      pool_->wait();
    }
    is_busy_ = is_running_ = false;
  }

  void observe(const Array<int32_t>& ids, py::array observations, Array<int32_t> numbers) {
    wait();
    const size_t stride = check_observations(observations, ids.size());
    uint8_t* to = static_cast<uint8_t*>(observations.mutable_data());
    for (py::ssize_t k = 0; k < ids.size(); ++k) {
      const int id = checked(ids.at(k));
      pool_->observe(id, to + k * stride);
      const StepResult info = pool_->info(id);
      const int32_t values[] = {0, info.lives, info.frame_number, info.episode_frame_number, info.error};
      for (int i = 0; i < 5; ++i) numbers.mutable_at(i, k) = values[i];
    }
  }

  py::bytes clone(int id) {
    wait();
    std::string bytes(pool_->clone_bytes(), '\0');
    pool_->clone(checked(id), reinterpret_cast<uint8_t*>(&bytes[0]));
    return bytes;
  }

  void restore(int id, const std::string& bytes) {
    wait();
    pool_->restore(checked(id), reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }

  std::vector<bool> was_reset() {
    wait();
    std::vector<bool> was_reset;
    for (int id = 0; id < pool_->num_envs(); ++id) was_reset.push_back(pool_->was_reset(id));
    return was_reset;
  }

  void check_state(const std::string& bytes) const {
    pool_->check(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }

  Array<uint8_t> rgb() {
    wait();
    if (!pool_->protocol().rgb_bytes()) throw std::runtime_error("this pool keeps no images in color");
    Array<uint8_t> frames({pool_->num_envs(), pool_->protocol().rows(), kScreenWidth, 3});
    std::memcpy(frames.mutable_data(), pool_->rgb(0), pool_->num_envs() * pool_->protocol().rgb_bytes());
    return frames;
  }

  Array<uint8_t> ram() {
    wait();
    Array<uint8_t> rams({pool_->num_envs(), 128});
    for (int id = 0; id < pool_->num_envs(); ++id) {
      std::memcpy(rams.mutable_data(id, 0), pool_->state(id).vcs.ram, 128);
    }
    return rams;
  }

 private:
  void refuse_while_running() const {
    if (is_busy_) throw std::runtime_error("the pool is stepping in another thread: one thread at a time can use it");
    if (is_running_) throw std::runtime_error("the pool is stepping: call wait() first");
  }

  void refuse_in_fork() const {
    if (!pool_->lost_threads()) return;
    throw std::runtime_error("the pool's threads are in the process that made it: make the environment after the fork");
  }

  int checked(int id) const {
    if (id < 0 || id >= pool_->num_envs()) {
      throw std::invalid_argument("environment " + std::to_string(id) + " is not one of " +
                                  std::to_string(pool_->num_envs()));
    }
    return id;
  }

  // Bytes between two environments' observations. Throws unless the array can take n of them.
  size_t check_observations(const py::array& array, py::ssize_t n) const {
    const size_t size = pool_->protocol().stack_bytes();
    bool fits = py::isinstance<py::array_t<uint8_t>>(array) && array.writeable() && array.ndim() >= 1 &&
                array.shape(0) == n && array.size() == n * static_cast<py::ssize_t>(size);
    py::ssize_t stride = 1;
    for (py::ssize_t axis = array.ndim() - 1; fits && axis > 0; --axis) {
      fits = array.shape(axis) == 1 || array.strides(axis) == stride;
      stride *= array.shape(axis);
    }
    fits = fits && (n == 1 || array.strides(0) >= static_cast<py::ssize_t>(size));
    if (!fits) {
      throw std::invalid_argument("observations need a writable uint8 array of " + std::to_string(n) + " x " +
                                  std::to_string(size) + " bytes, each environment's in one piece");
    }
    return n == 1 ? size : static_cast<size_t>(array.strides(0));
  }

  std::unique_ptr<Pool> pool_;
  bool is_running_ = false;  // between start() and wait()
  bool is_busy_ = false;   // both only change under the GIL
  py::object kept_;  // the arrays of the job
};

}  // namespace

void bind_pool(py::module_& module) {
  py::class_<PythonPool> pool(module, "Pool");
  pool.def(py::init([](const std::string& rom, const std::string& game, int num_envs, int num_threads,
                       const Array<uint8_t>& palette, const py::dict& settings) {
             return std::make_unique<PythonPool>(rom, game, num_envs, num_threads, palette, settings_of(settings));
           }),
           py::arg("rom"), py::arg("game"), py::arg("num_envs"), py::arg("num_threads"), py::arg("palette"),
           py::arg("settings"));
  const auto prepared = [](Job::Kind kind, bool is_waited_for) {
    return [kind, is_waited_for](PythonPool& self, const Array<int32_t>& ids, const Array<int64_t>& actions_or_seeds,
                                 const py::array& observations, const py::object& final_observations,
                                 Array<int32_t> numbers, Array<bool> flags) {
      self.prepare(kind, ids, actions_or_seeds, observations, final_observations, numbers, flags);
      if (is_waited_for) {
        self.run();
      } else {
        self.start();
      }
    };
  };
  const auto def = [&](const char* name, auto function) {
    pool.def(name, function, py::arg("ids"), py::arg("actions_or_seeds"), py::arg("observations"),
             py::arg("final_observations").none(true), py::arg("numbers").noconvert(), py::arg("flags").noconvert());
  };
  def("reset", prepared(Job::Kind::kReset, true));
  def("seeded_reset", prepared(Job::Kind::kSeededReset, true));
  def("step", prepared(Job::Kind::kStep, true));
  def("start_step", prepared(Job::Kind::kStep, false));
  pool.def("wait", &PythonPool::wait);
  pool.def("observe", &PythonPool::observe, py::arg("ids"), py::arg("observations"), py::arg("numbers").noconvert());
  pool.def("clone", &PythonPool::clone).def("restore", &PythonPool::restore);
  pool.def("check_state", &PythonPool::check_state);
  pool.def("rgb", &PythonPool::rgb).def("ram", &PythonPool::ram);
  pool.def_property_readonly("was_reset", &PythonPool::was_reset);
  pool.def_property_readonly("bytes_per_env", [](PythonPool& self) { return self.pool().bytes_per_env(); });

  // What the tests of the scaling use: an image [H, W(, C)] as an environment scales it.
  module.def("resize", [](const Array<uint8_t>& image, int height, int width) {
    if (image.ndim() != 2 && image.ndim() != 3) throw std::invalid_argument("an image is [H, W] or [H, W, C]");
    const int channels = image.ndim() == 3 ? static_cast<int>(image.shape(2)) : 1;
    const Resizer resize(image.shape(0), image.shape(1), height, width, channels);
    std::vector<py::ssize_t> shape = {height, width};
    if (image.ndim() == 3) shape.push_back(channels);
    Array<uint8_t> scaled(shape);
    Resizer::Scratch scratch = resize.scratch();
    resize(image.data(), scaled.mutable_data(), scratch);
    return scaled;
  });
}

}  // namespace beast::atari
