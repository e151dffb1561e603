// The classes `BatchGame` and `Batch` of the Python module: the host's half of environments on a GPU. beast/gpu/atari.py
// is their user.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "batch_host.h"
#include "from_python.h"

namespace beast::atari {

void bind_batch(py::module_& module) {
  py::class_<BatchGame, std::shared_ptr<BatchGame>> game(module, "BatchGame");
  game.def(py::init([](const std::string& rom, const std::string& name, const py::dict& settings, bool is_exact) {
             return std::make_shared<BatchGame>(rom_of(rom, name), settings_of(settings), is_exact);
           }),
           py::arg("rom"), py::arg("game"), py::arg("settings"), py::arg("exact"));
  // Start frames [n, resets] and generators [n, bytes] of consoles that begin with these seeds.
  game.def("seeded", [](const BatchGame& self, const Array<uint32_t>& seeds) {
    const py::ssize_t n = seeds.size();
    Array<uint8_t> lengths({n, static_cast<py::ssize_t>(BatchGame::kNumResets)});
    Array<uint8_t> generators({n, static_cast<py::ssize_t>(self.generator_bytes())});
    for (py::ssize_t k = 0; k < n; ++k) {
      self.seed(seeds.data()[k], lengths.mutable_data(k, 0), generators.mutable_data(k, 0));
    }
    return py::make_tuple(lengths, generators);
  });
  // What the kernel `describe` writes on a GPU.
  game.def("layout", [](const BatchGame& self) {
    Array<uint32_t> layout(kNumLayout);
    self.describe(layout.mutable_data());
    return layout;
  });
  game.attr("ram_offset") = offsetof(Vcs, ram);
  game.attr("num_resets") = static_cast<int>(BatchGame::kNumResets);

  py::class_<HostBatch> batch(module, "Batch");
  batch.def(py::init([](std::shared_ptr<BatchGame> of, int count, int lanes) {
              check(count, 1, 1 << 20, "count");
              check(lanes, 1, kWarpSize, "lanes");
              return std::make_unique<HostBatch>(std::move(of), count, lanes);
            }),
            py::arg("game"), py::arg("count"), py::arg("lanes"));
  // Name, bytes and contents of each array: a view of a constant of the game, None where it begins with zeros.
  batch.def("arrays", [](const py::object& self) {
    py::list found;
    for (const BatchArray& array : self.cast<const HostBatch&>().arrays()) {
      py::object contents = py::none();
      if (array.contents) contents = Array<uint8_t>(array.bytes, static_cast<const uint8_t*>(array.contents), self);
      found.append(py::make_tuple(array.name, array.bytes, contents));
    }
    return found;
  });
  // Takes the addresses of the arrays; returns what kernels get.
  batch.def("place", [](HostBatch& self, const std::vector<uintptr_t>& addresses) {
    if (addresses.size() != self.arrays().size()) throw std::invalid_argument("not an address for each array");
    return py::bytes(reinterpret_cast<const char*>(&self.place(addresses)), sizeof(Batch));
  });
  batch.def("run", &HostBatch::run, py::arg("kernel"), py::arg("reversed") = false,
            py::call_guard<py::gil_scoped_release>());
}

}  // namespace beast::atari
