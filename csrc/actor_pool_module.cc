// The Python bindings of ActorPool and handshake(). Their documentation is in libbeast.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "actor_pool.h"
#include "grpc_listener.h"
#include "grpc_stream.h"
#include "python_nest.h"
#include "stream_source.h"
#include "wire.h"

namespace beast {
namespace {

std::chrono::milliseconds milliseconds_of(const char* name, double seconds) {
  if (!(seconds > 0 && seconds < 1e6)) {
    throw py::value_error(std::string(name) + " is " + std::to_string(seconds) +
                          ", must be above 0 and below 1000000 s");
  }
  return std::max(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)), std::chrono::milliseconds(1));
}

// Pools whose threads must end before the interpreter does. A daemon thread may run one, and nothing joins that.
class LivePools {
 public:
  void add(const std::shared_ptr<ActorPool>& pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    pools_.push_back(pool);
  }

  void stop() {
    std::vector<std::weak_ptr<ActorPool>> pools;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      pools.swap(pools_);
    }
    for (const auto& weak : pools) {
      if (const auto pool = weak.lock()) pool->stop_and_wait();
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<ActorPool>> pools_;
};

auto* live_pools = new LivePools();  // never destroyed: threads may outlive main()

py::tuple field_type(const Field& field) {
  return py::make_tuple(dtype_name(field.dtype), py::tuple(py::cast(field.shape)));
}

py::object names_of(const Nest<int64_t>& nest, const std::vector<Field>& fields) {
  if (nest.is_leaf()) return py::str(fields[nest.leaf()].name);
  if (nest.is_tuple()) {
    py::list parts;
    for (const auto& part : nest.tuple()) parts.append(names_of(part, fields));
    return py::tuple(parts);
  }
  py::dict parts;
  for (const auto& [name, part] : nest.dict()) parts[py::str(name)] = names_of(part, fields);
  return parts;
}

py::dict spec_to_python(const StreamSpec& spec) {
  py::dict fields, result;
  for (const Field& field : spec.fields) fields[py::str(field.name)] = field_type(field);
  result["env"] = spec.env;
  result["num_envs"] = spec.num_envs;
  result["fields"] = fields;
  result["observation"] = names_of(spec.observation, spec.fields);
  result["action"] = spec.takes_any_action ? py::object(py::none()) : field_type(spec.action);
  result["observation_space"] = spec.observation_space;
  result["action_space"] = spec.action_space;
  result["frames_per_step"] = spec.frames_per_step;
  return result;
}

Field field_from_python(const std::string& name, py::handle type) {
  const auto [dtype, shape] = type.cast<std::pair<std::string, Shape>>();
  return {name, dtype_from_name(dtype), shape};
}

Nest<int64_t> indices_of(py::handle names, const StreamSpec& spec) {
  if (py::isinstance<py::str>(names)) return Nest<int64_t>(spec.index_of(names.cast<std::string>()));
  if (py::isinstance<py::tuple>(names)) {
    Nest<int64_t>::Tuple parts;
    for (const py::handle part : names) parts.push_back(indices_of(part, spec));
    return Nest<int64_t>(std::move(parts));
  }
  Nest<int64_t>::Dict parts;
  for (const auto& [name, part] : names.cast<py::dict>()) {
    parts.emplace(name.cast<std::string>(), indices_of(part, spec));
  }
  return Nest<int64_t>(std::move(parts));
}

// What spec_to_python() made of a spec.
StreamSpec spec_from_python(const py::dict& hello) {
  StreamSpec spec;
  spec.env = hello["env"].cast<std::string>();
  spec.num_envs = hello["num_envs"].cast<int64_t>();
  for (const auto& [name, type] : hello["fields"].cast<py::dict>()) {
    spec.fields.push_back(field_from_python(name.cast<std::string>(), type));
  }
  spec.observation = indices_of(hello["observation"], spec);
  spec.takes_any_action = hello["action"].is_none();
  if (!spec.takes_any_action) spec.action = field_from_python("action", hello["action"]);
  spec.observation_space = hello["observation_space"].cast<std::string>();
  spec.action_space = hello["action_space"].cast<std::string>();
  spec.frames_per_step = hello.contains("frames_per_step") ? hello["frames_per_step"].cast<int64_t>() : 0;
  return spec;
}

class PythonActorPool {
 public:
  PythonActorPool(std::shared_ptr<ActorPool> pool, py::object log) : pool_(std::move(pool)), log_(std::move(log)) {
    live_pools->add(pool_);
  }

  // There is no destructor that waits: run() has ended, as its caller holds this object. One that released the GIL
  // could not get it back in a daemon thread while the interpreter shuts down.

  void run() {
    const auto log = [this](const std::string& message) {
      py::gil_scoped_acquire acquire;
      if (log_.is_none()) {
        py::print(message, py::arg("file") = py::module_::import("sys").attr("stderr"), py::arg("flush") = true);
      } else {
        log_(message);
      }
    };
    without_gil([&](const Interrupt& interrupt) { pool_->run(interrupt, log); });
  }

  void stop() {
    if (generation_ != generation()) return;
    py::gil_scoped_release release;
    pool_->stop();
  }

  int64_t count() const { return pool_->count(); }

  void tell(const std::string& progress) {
    if (progress.size() > kMaxProgressBytes) {
      throw py::value_error("progress has " + std::to_string(progress.size()) + " bytes, at most " +
                            std::to_string(kMaxProgressBytes) + " are taken");
    }
    pool_->tell(progress);
  }

  py::list take_metrics() {
    py::list result;
    for (const std::string& metrics : pool_->take_metrics()) result.append(py::bytes(metrics));
    return result;
  }

  py::dict counters() const {
    const ActorPoolCounters counters = pool_->counters();
    py::dict result;
    result["restarts"] = counters.restarts;
    result["dropped_rollouts"] = counters.dropped_rollouts;
    result["streams_connected"] = counters.streams_connected;
    result["streams_come"] = counters.streams_come;
    result["seconds_inference"] = counters.seconds_inference;
    result["seconds_environment"] = counters.seconds_environment;
    result["seconds_enqueue"] = counters.seconds_enqueue;
    return result;
  }

 private:
  const std::shared_ptr<ActorPool> pool_;
  const py::object log_;
  const int generation_ = generation();  // a forked child has no streams to stop, and must not touch its parent's
};

struct PythonListener : GrpcListener {
  using GrpcListener::GrpcListener;
  const int made_in = generation();  // a forked child has none of the threads that its parent's listener has
};

std::shared_ptr<PythonListener> make_listener(const std::string& address, const std::string& token,
                                              const std::string& certificate, const std::string& key,
                                              double env_timeout, int64_t max_streams) {
  if (max_streams < 1) throw py::value_error("max_streams is " + std::to_string(max_streams) + ", must be 1 or more");
  if (certificate.empty() != key.empty()) {
    throw py::value_error("certificate and key go together: give both, or neither for plain text");
  }
  const ListenerOptions options{
      address, token, certificate, key, milliseconds_of("env_timeout", env_timeout), static_cast<size_t>(max_streams)};
  py::gil_scoped_release release;
  return shared_here(new PythonListener(options));
}

std::optional<py::dict> first_hello(PythonListener& listener, const py::object& check, double timeout) {
  const auto refusal_of = [&](const StreamSpec& spec) {
    const py::gil_scoped_acquire acquire;
    return check.is_none() ? "" : check(spec_to_python(spec)).cast<std::string>();
  };
  const auto spec = without_gil([&](const Interrupt& interrupt) {
    return listener.first_hello(refusal_of, milliseconds_of("timeout", timeout), interrupt);
  });
  return spec ? std::optional(spec_to_python(*spec)) : std::nullopt;
}

// Streams that gRPC opens at these addresses.
std::unique_ptr<StreamSource> grpc_streams_at(std::vector<std::string> addresses, GrpcOptions options,
                                              const DialOptions& dial_options) {
  for (const std::string& address : addresses) {
    options.address = address;
    check(options);
  }
  const auto streams = std::make_shared<GrpcStreams>(addresses.size());
  const auto connect = [options, streams](const std::string& address) {
    GrpcOptions with_address = options;
    with_address.address = address;
    return streams->connect(with_address);
  };
  return dialed_streams(std::move(addresses), connect, dial_options);
}

std::unique_ptr<StreamSource> grpc_streams_of(std::shared_ptr<PythonListener> listener, int64_t min_streams) {
  const size_t num_places = listener->max_streams();
  const auto listen = [listener = std::move(listener)](const Admit& admit) { listener->serve(admit); };
  return admitted_streams(num_places, listen, min_streams);
}

std::unique_ptr<PythonActorPool> make_pool(
    int64_t unroll_length, std::shared_ptr<BatchingQueue> learner_queue,
    std::shared_ptr<DynamicBatcher> inference_batcher, std::vector<std::string> env_server_addresses,
    const py::object& initial_agent_state, const std::vector<std::string>& row_fields, const std::string& token,
    const std::string& root_certificates, uint64_t seed, const std::string& env, double env_timeout,
    double connect_timeout, int64_t max_env_restarts, bool insecure, std::optional<int64_t> min_streams,
    const std::optional<py::dict>& expected, std::shared_ptr<PythonListener> listener, py::object log) {
  if (listener && !env_server_addresses.empty()) {
    throw py::value_error("env_server_addresses and listener exclude each other");
  }
  if (max_env_restarts < 0) {
    throw py::value_error("max_env_restarts is " + std::to_string(max_env_restarts) + ", must be 0 or more");
  }
  const GrpcOptions grpc_options{"",
                                 token,
                                 root_certificates,
                                 env,
                                 insecure,
                                 milliseconds_of("env_timeout", env_timeout),
                                 milliseconds_of("connect_timeout", connect_timeout)};
  DialOptions dial_options;
  dial_options.max_restarts = max_env_restarts;
  dial_options.min_streams = min_streams.value_or(dial_options.min_streams);
  auto source = listener ? grpc_streams_of(std::move(listener), min_streams.value_or(1))
                         : grpc_streams_at(std::move(env_server_addresses), grpc_options, dial_options);
  const ActorPoolOptions options{unroll_length, row_fields, seed,
                                 expected ? std::optional(spec_from_python(*expected)) : std::nullopt};
  auto pool = shared_here(new ActorPool(options, std::move(learner_queue), std::move(inference_batcher),
                                        nest_from_python(initial_agent_state), std::move(source)));
  return std::make_unique<PythonActorPool>(std::move(pool), std::move(log));
}

py::dict handshake(const std::string& address, const std::string& token, const std::string& root_certificates,
                   const std::string& env, double timeout, bool insecure) {
  const std::chrono::milliseconds limit = milliseconds_of("timeout", timeout);
  const GrpcOptions options{address, token, root_certificates, env, insecure, limit, limit};
  return spec_to_python(without_gil([&](const Interrupt& interrupt) { return ask_for_hello(options, interrupt); }));
}

}  // namespace

void bind_actor_pool(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const ConnectionError& lost) {
      PyErr_SetString(PyExc_ConnectionError, lost.what());
    } catch (const HandshakeError& refused) {
      PyErr_SetString(PyExc_ConnectionRefusedError, refused.what());
    }
  });
  py::class_<PythonListener, std::shared_ptr<PythonListener>>(module, "EnvListener")
      .def(py::init(&make_listener), py::arg("address"), py::kw_only(), py::arg("token") = "",
           py::arg("certificate") = py::bytes(), py::arg("key") = py::bytes(), py::arg("env_timeout") = 60.0,
           py::arg("max_streams") = 256)
      .def_property_readonly("address", &GrpcListener::address)
      .def_property_readonly("max_streams", &GrpcListener::max_streams)
      .def("first_hello", &first_hello, py::arg("check") = py::none(), py::kw_only(), py::arg("timeout") = 999999.0)
      .def("refusals", &GrpcListener::refusals)
      .def("close", [](PythonListener& listener) {
        if (listener.made_in != generation()) return;
        without_gil([&](const Interrupt&) { listener.close(); });
      });
  py::class_<PythonActorPool>(module, "ActorPool")
      .def(py::init(&make_pool), py::arg("unroll_length"), py::arg("learner_queue"), py::arg("inference_batcher"),
           py::arg("env_server_addresses"), py::arg("initial_agent_state"), py::kw_only(),
           py::arg("row_fields") = required_fields(), py::arg("token") = "", py::arg("root_certificates") = py::bytes(),
           py::arg("seed") = 1, py::arg("env") = "", py::arg("env_timeout") = 60.0, py::arg("connect_timeout") = 30.0,
           py::arg("max_env_restarts") = 5, py::arg("insecure") = false, py::arg("min_streams") = py::none(),
           py::arg("expected") = py::none(), py::arg("listener") = nullptr, py::arg("log") = py::none())
      .def("run", &PythonActorPool::run)
      .def("stop", &PythonActorPool::stop)
      .def("count", &PythonActorPool::count)
      .def("tell", &PythonActorPool::tell, py::arg("progress"))
      .def("take_metrics", &PythonActorPool::take_metrics)
      .def("counters", &PythonActorPool::counters);
  module.def("handshake", &handshake, py::arg("address"), py::kw_only(), py::arg("token") = "",
             py::arg("root_certificates") = py::bytes(), py::arg("env") = "", py::arg("timeout") = 30.0,
             py::arg("insecure") = false);
  // At exit, before the interpreter is finalized: no thread may return from run() after that.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    py::gil_scoped_release release;
    live_pools->stop();
  }));
  const py::object os = py::module_::import("os");
  if (!py::hasattr(os, "register_at_fork")) return;
  os.attr("register_at_fork")(py::arg("after_in_child") = py::cpp_function([] { live_pools = new LivePools(); }));
}

}  // namespace beast
