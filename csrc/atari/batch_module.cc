// The class `Batch` of the Python module: the host's half of environments on a GPU. beast/gpu/atari.py is its user.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "batch_host.h"
#include "from_python.h"

namespace beast::atari {

void bind_batch(py::module_& module) {
  py::class_<HostBatch> batch(module, "Batch");
  batch.def(py::init([](const std::string& rom, const std::string& game, int count, int lanes, const py::dict& settings,
                        bool is_exact) {
              check(count, 1, 1 << 20, "count");
              check(lanes, 1, kWarpSize, "lanes");
              return std::make_unique<HostBatch>(rom_of(rom, game), settings_of(settings), count, lanes, is_exact);
            }),
            py::arg("rom"), py::arg("game"), py::arg("count"), py::arg("lanes"), py::arg("settings"), py::arg("exact"));
  // Name, bytes, and what it begins with (None: zeros) of each array.
  batch.def("arrays", [](const HostBatch& self) {
    py::list found;
    for (const BatchArray& array : self.arrays()) {
      py::object contents = py::none();
      if (array.contents) contents = Array<uint8_t>(array.bytes, static_cast<const uint8_t*>(array.contents));
      found.append(py::make_tuple(array.name, array.bytes, contents));
    }
    return found;
  });
  // Takes the addresses of the arrays; returns what kernels get.
  batch.def("place", [](HostBatch& self, const std::vector<uintptr_t>& addresses) {
    if (addresses.size() != self.arrays().size()) throw std::invalid_argument("not an address for each array");
    return py::bytes(reinterpret_cast<const char*>(&self.place(addresses)), sizeof(Batch));
  });
  // Start frames [n, resets] and generators [n, bytes] of consoles that begin with these seeds.
  batch.def("seeded", [](const HostBatch& self, const Array<uint32_t>& seeds) {
    const py::ssize_t n = seeds.size();
    Array<uint8_t> lengths({n, static_cast<py::ssize_t>(HostBatch::kNumResets)});
    Array<uint8_t> generators({n, static_cast<py::ssize_t>(self.generator_bytes())});
    for (py::ssize_t k = 0; k < n; ++k) {
      self.seed(seeds.data()[k], lengths.mutable_data(k, 0), generators.mutable_data(k, 0));
    }
    return py::make_tuple(lengths, generators);
  });
  batch.def("run", &HostBatch::run, py::arg("kernel"), py::arg("reversed") = false,
            py::call_guard<py::gil_scoped_release>());
  // What `describe` writes on a GPU.
  batch.def("layout", [](const HostBatch& self) {
    Array<uint32_t> layout(kNumLayout);
    self.describe(layout.mutable_data());
    return layout;
  });
  batch.attr("ram_offset") = offsetof(Vcs, ram);
  batch.attr("num_resets") = static_cast<int>(HostBatch::kNumResets);
}

}  // namespace beast::atari
