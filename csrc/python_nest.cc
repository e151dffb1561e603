#include "python_nest.h"

#include <pybind11/numpy.h>

#include <atomic>
#include <chrono>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace beast {
namespace {

// Python objects that a thread without the GIL has released, to be freed by one that has it. The thread does not take
// the GIL itself: waiting for it would slow down an actor, and while the interpreter shuts down it would end the
// process.
class ReleasedObjects {
 public:
  void add(PyObject* object) {
    std::lock_guard lock(mutex_);
    objects_.push_back(object);
    waiting_ = true;
    if (!scheduled_) scheduled_ = Py_AddPendingCall(&ReleasedObjects::free_soon, this) == 0;
  }

  void free_all() {
    if (!waiting_) return;
    std::vector<PyObject*> objects;
    {
      std::lock_guard lock(mutex_);
      objects.swap(objects_);
      waiting_ = false;
    }
    for (PyObject* object : objects) Py_DECREF(object);  // runs arbitrary code, so without the lock
  }

 private:
  static int free_soon(void* self) {
    auto* released = static_cast<ReleasedObjects*>(self);
    {
      std::lock_guard lock(released->mutex_);
      released->scheduled_ = false;
    }
    released->free_all();
    return 0;
  }

  std::mutex mutex_;
  std::vector<PyObject*> objects_;
  std::atomic<bool> waiting_{false};
  bool scheduled_ = false;
};

ReleasedObjects& released_objects() {
  static auto* const objects = new ReleasedObjects();  // never destroyed: threads may outlive main()
  return *objects;
}

std::shared_ptr<void> owner_of(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* p) {
    auto* const object = static_cast<PyObject*>(p);
    if (!Py_IsInitialized()) return;  // shut down: the object ends with the process
    if (PyGILState_Check()) {
      Py_DECREF(object);
    } else {
      released_objects().add(object);
    }
  });
}

unsigned long main_thread = 0;
int num_forks = 0;

void begin_forked_child() {
  main_thread = PyThread_get_thread_ident();
  ++num_forks;
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// A module's attribute, looked up once and never freed. The GIL guards `cache`. The lock of a C++ static could deadlock
// with the GIL, because an import releases it.
py::handle attribute(py::handle& cache, const char* module, const char* name) {
  if (!cache) cache = py::object(py::module_::import(module).attr(name)).release();
  return cache;
}

// torch.Tensor, or null before torch is imported: no object can be a tensor then.
py::handle torch_tensor_type() {
  static py::handle type;
  if (type) return type;
  const auto torch = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str("torch").ptr()));
  PyErr_Clear();
  return torch && py::hasattr(torch, "Tensor") ? attribute(type, "torch", "Tensor") : py::handle();
}

// torch.from_numpy, or None if torch is not installed.
py::handle torch_from_numpy() {
  static py::handle function;
  try {
    return attribute(function, "torch", "from_numpy");
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    return function = py::none().release();
  }
}

std::optional<DType> dtype_from_numpy(const py::dtype& dtype) {
  const auto of_size = [&](std::initializer_list<std::pair<int, DType>> sizes) -> std::optional<DType> {
    for (const auto& [size, type] : sizes) {
      if (size == dtype.itemsize()) return type;
    }
    return std::nullopt;
  };
  if (dtype.byteorder() == '>') return std::nullopt;  // big-endian; native little-endian is '=' or '|'
  switch (dtype.kind()) {
    case 'b':
      return DType::kBool;
    case 'i':
      return of_size({{1, DType::kInt8}, {2, DType::kInt16}, {4, DType::kInt32}, {8, DType::kInt64}});
    case 'u':
      return of_size({{1, DType::kUInt8}, {2, DType::kUInt16}, {4, DType::kUInt32}, {8, DType::kUInt64}});
    case 'f':
      return of_size({{2, DType::kFloat16}, {4, DType::kFloat32}, {8, DType::kFloat64}});
    default:
      return std::nullopt;
  }
}

constexpr const char* kRemedy =
    "; libbeast moves bool, int8 to int64, uint8 to uint64, float16, float32 and float64 in CPU memory: convert it "
    "first";

Array array_from_numpy(py::array array) {
  const std::optional<DType> dtype = dtype_from_numpy(array.dtype());
  if (!dtype) {
    throw py::type_error("cannot take an array of dtype " + std::string(py::str(array.dtype())) + kRemedy);
  }
  // Whoever receives the memory may write to it, and torch needs aligned items.
  if (!array.writeable() || !(array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_)) array = array.attr("copy")();
  Shape shape(array.shape(), array.shape() + array.ndim());
  const Shape strides(array.strides(), array.strides() + array.ndim());
  void* const data = const_cast<void*>(array.data());
  return Array::from_strided(*dtype, std::move(shape), strides, data, owner_of(std::move(array)));
}

py::array numpy_from_torch(py::handle tensor) {
  try {
    const bool requires_grad = tensor.attr("requires_grad").cast<bool>();
    return (requires_grad ? tensor.attr("detach")() : py::reinterpret_borrow<py::object>(tensor)).attr("numpy")();
  } catch (py::error_already_set& error) {
    throw py::type_error("cannot take a " + std::string(py::str(tensor.attr("dtype"))) + " tensor on " +
                         std::string(py::str(tensor.attr("device"))) + kRemedy + " (" +
                         std::string(py::str(error.value())) + ")");
  }
}

Array leaf_from_python(py::handle object) {
  static py::handle asarray, from_dlpack, scalar;
  if (py::isinstance<py::array>(object)) return array_from_numpy(py::reinterpret_borrow<py::array>(object));
  if (const py::handle tensor = torch_tensor_type(); tensor && py::isinstance(object, tensor)) {
    return array_from_numpy(numpy_from_torch(object));
  }
  if (PyLong_Check(object.ptr()) || PyFloat_Check(object.ptr()) || PyComplex_Check(object.ptr()) ||  // bool is an int
      py::isinstance(object, attribute(scalar, "numpy", "generic"))) {
    return array_from_numpy(attribute(asarray, "numpy", "asarray")(object));
  }
  if (PyObject_CheckBuffer(object.ptr())) {
    const py::memoryview buffer(py::reinterpret_borrow<py::object>(object));
    return array_from_numpy(attribute(asarray, "numpy", "asarray")(buffer));
  }
  if (py::hasattr(object, "__dlpack__")) {
    return array_from_numpy(attribute(from_dlpack, "numpy", "from_dlpack")(object));
  }
  throw py::type_error(
      "cannot take a " + type_name(object) +
      " in a nest: expected tuples, lists and dicts of numpy arrays, torch tensors, numbers, or objects "
      "with the buffer protocol or __dlpack__");
}

ArrayNest convert(py::handle object) {
  if (py::isinstance<py::tuple>(object) || py::isinstance<py::list>(object)) {
    ArrayNest::Tuple parts;
    for (const py::handle part : py::reinterpret_borrow<py::sequence>(object)) parts.push_back(nest_from_python(part));
    return parts;
  }
  if (py::isinstance<py::dict>(object)) {
    ArrayNest::Dict parts;
    for (const auto& [name, part] : py::reinterpret_borrow<py::dict>(object)) {
      if (!py::isinstance<py::str>(name)) {
        throw py::type_error("cannot take a dict with the key " + std::string(py::repr(name)) + " (" + type_name(name) +
                             "): keys must be str");
      }
      parts.emplace(name.cast<std::string>(), nest_from_python(part));
    }
    return parts;
  }
  return leaf_from_python(object);
}

py::object leaf_to_python(const Array& array) {
  const py::capsule owner(new std::shared_ptr<void>(array.owner()),
                          [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
  py::array numpy(py::dtype(dtype_name(array.dtype())), array.shape(), {}, array.data(), owner);
  const py::handle from_numpy = torch_from_numpy();
  return from_numpy.is_none() ? py::object(std::move(numpy)) : from_numpy(numpy);
}

}  // namespace

ArrayNest nest_from_python(py::handle object) {
  if (Py_EnterRecursiveCall(" in a nest for libbeast")) throw py::error_already_set();
  struct Leave {
    ~Leave() { Py_LeaveRecursiveCall(); }
  } leave;
  return convert(object);
}

py::object nest_to_python(const ArrayNest& nest) {
  if (nest.is_leaf()) return leaf_to_python(nest.leaf());
  if (nest.is_tuple()) {
    py::tuple parts(nest.tuple().size());
    for (size_t i = 0; i < nest.tuple().size(); ++i) parts[i] = nest_to_python(nest.tuple()[i]);
    return parts;
  }
  py::dict parts;
  for (const auto& [name, part] : nest.dict()) parts[py::str(name)] = nest_to_python(part);
  return parts;
}

bool on_main_thread() { return PyThread_get_thread_ident() == main_thread; }

void take_gil_again(PyThreadState* thread) {
  // Before 3.14 Python ends such a thread, which can crash in C++ frames. From 3.14 on it hangs the thread as we do
  // here.
  while (!Py_IsInitialized() && !on_main_thread()) std::this_thread::sleep_for(std::chrono::hours(1));
  PyEval_RestoreThread(thread);
}

int generation() { return num_forks; }

void free_released_objects() { released_objects().free_all(); }

void watch_main_thread() {
  const py::object threading = py::module_::import("threading");
  main_thread = threading.attr("main_thread")().attr("ident").cast<unsigned long>();
  const py::object os = py::module_::import("os");
  if (!py::hasattr(os, "register_at_fork")) return;
  os.attr("register_at_fork")(py::arg("after_in_child") = py::cpp_function(&begin_forked_child));
}

}  // namespace beast
