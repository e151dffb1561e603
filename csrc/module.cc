// The Python module `libbeast`. Its documentation is in libbeast.pyi.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "batching.h"
#include "grpc_log.h"
#include "grpc_stream.h"
#include "python_nest.h"

namespace beast {

void bind_actor_pool(py::module_& module);  // actor_pool_module.cc

namespace {

using Milliseconds = std::optional<int64_t>;

constexpr int64_t kHundredYears = 3'155'760'000'000;  // in ms; a clock that counts nanoseconds overflows after 292

std::optional<std::chrono::milliseconds> duration(Milliseconds timeout_ms) {
  if (!timeout_ms) return std::nullopt;
  return std::chrono::milliseconds(std::min(*timeout_ms, kHundredYears));
}

std::optional<std::chrono::milliseconds> duration_of_seconds(std::optional<double> timeout) {
  if (!timeout) return std::nullopt;
  if (!(*timeout >= 0)) throw py::value_error("timeout is " + std::to_string(*timeout) + ", must be 0 s or more");
  return std::chrono::milliseconds(static_cast<int64_t>(std::min(std::ceil(*timeout * 1000), 1.0 * kHundredYears)));
}

// In TorchBeast an item is one row. The pool's items, which do not come this way, have a row for each environment.
Counts counts_of(const BatchingOptions& options) { return options.as_torchbeast ? Counts::kAsOne : Counts::kRows; }

void bind_errors(py::module_& module) {
  py::register_exception<ClosedBatchingQueue>(module, "ClosedBatchingQueue", PyExc_RuntimeError);
  py::register_exception<AsyncError>(module, "AsyncError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const TimeoutError& timeout) {
      PyErr_SetString(PyExc_TimeoutError, timeout.what());
    }
  });
}

void bind_batching_queue(py::module_& module) {
  const auto make = [](int64_t batch_dim, int64_t minimum_batch_size, int64_t maximum_batch_size,
                       Milliseconds timeout_ms, bool check_inputs, std::optional<int64_t> maximum_queue_size,
                       bool as_torchbeast) {
    return shared_here(
        new BatchingQueue(BatchingOptions{batch_dim, minimum_batch_size, maximum_batch_size, duration(timeout_ms),
                                          check_inputs, maximum_queue_size, as_torchbeast}));
  };
  const auto enqueue = [](BatchingQueue& queue, py::handle inputs) {
    ArrayNest item = nest_from_python(inputs);
    without_gil(
        [&](const Interrupt& interrupt) { queue.enqueue(std::move(item), interrupt, counts_of(queue.options())); });
  };
  const auto get = [](BatchingQueue& queue, std::optional<double> timeout) -> py::object {
    const auto limit = duration_of_seconds(timeout);
    const auto batch = without_gil([&](const Interrupt& interrupt) { return queue.dequeue(interrupt, limit); });
    return batch ? nest_to_python(*batch) : py::none();
  };
  const auto next = [get](BatchingQueue& queue) {
    try {
      return get(queue, std::nullopt);
    } catch (const ClosedBatchingQueue&) {
      throw py::stop_iteration();
    }
  };
  py::class_<BatchingQueue, std::shared_ptr<BatchingQueue>>(module, "BatchingQueue")
      .def(py::init(make), py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = py::none(), py::arg("check_inputs") = true,
           py::arg("maximum_queue_size") = py::none(), py::kw_only(), py::arg("as_torchbeast") = false)
      .def("enqueue", enqueue, py::arg("inputs"))
      .def("get", get, py::arg("timeout") = py::none())
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", next)
      .def("size", &BatchingQueue::size)
      .def("is_closed", &BatchingQueue::is_closed)
      .def("close", &BatchingQueue::close);
}

void bind_dynamic_batcher(py::module_& module) {
  const auto set_outputs = [](Batch& batch, py::handle outputs) {
    ArrayNest nest;
    try {
      nest = nest_from_python(outputs);
    } catch (const std::exception& error) {
      batch.refuse(error.what());
      throw;
    }
    without_gil([&](const Interrupt&) { batch.set_outputs(nest); });
  };
  py::class_<Batch, std::shared_ptr<Batch>>(module, "Batch")
      .def("get_inputs", [](const Batch& batch) { return nest_to_python(batch.inputs()); })
      .def("set_outputs", set_outputs, py::arg("outputs"));

  const auto make = [](int64_t batch_dim, int64_t minimum_batch_size, int64_t maximum_batch_size,
                       Milliseconds timeout_ms, bool check_outputs, bool as_torchbeast) {
    const BatchingOptions options{batch_dim,
                                  minimum_batch_size,
                                  maximum_batch_size,
                                  duration(timeout_ms),
                                  /*check_inputs=*/true,
                                  /*maximum_queue_size=*/std::nullopt,
                                  as_torchbeast};
    return shared_here(new DynamicBatcher(options, check_outputs));
  };
  const auto compute = [](DynamicBatcher& batcher, py::handle inputs, Milliseconds timeout_ms) {
    // Queued with the GIL, so that threads queue in the order in which Python runs them.
    const auto pending = batcher.start(nest_from_python(inputs), counts_of(batcher.options()));
    return nest_to_python(without_gil(
        [&](const Interrupt& interrupt) { return batcher.wait(*pending, interrupt, duration(timeout_ms)); }));
  };
  const auto next = [](DynamicBatcher& batcher) {
    try {
      return without_gil([&](const Interrupt& interrupt) { return batcher.next(interrupt); });
    } catch (const ClosedBatchingQueue&) {
      throw py::stop_iteration();
    }
  };
  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>>(module, "DynamicBatcher")
      .def(py::init(make), py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = 100, py::arg("check_outputs") = true,
           py::kw_only(), py::arg("as_torchbeast") = false)
      .def("compute", compute, py::arg("inputs"), py::kw_only(), py::arg("timeout_ms") = 10 * 60 * 1000)
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", next)
      .def("size", &DynamicBatcher::size)
      .def("is_closed", &DynamicBatcher::is_closed)
      .def("close", &DynamicBatcher::close);
}

}  // namespace
}  // namespace beast

PYBIND11_MODULE(libbeast, module) {
  module.doc() = "Batching queues and the actor pool of PolyBeast, in C++.";
  module.attr("__version__") = BEAST_VERSION;
  beast::watch_main_thread();
  beast::guard_grpc_log();
  beast::bind_errors(module);
  beast::bind_batching_queue(module);
  beast::bind_dynamic_batcher(module);
  beast::bind_actor_pool(module);
}
