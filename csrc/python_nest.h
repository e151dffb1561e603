// Between Python and the core: nests both ways, the GIL, Ctrl-C. Only the binding files include this.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <optional>
#include <type_traits>

#include "batching.h"

namespace beast {

namespace py = pybind11;

// Tuples, lists and dicts with str keys of numpy arrays, torch tensors on the CPU, anything with the buffer protocol or
// `__dlpack__`, and Python and numpy scalars (0-d arrays). Memory is shared where it is writable and C-contiguous, else
// copied. Throws TypeError or ValueError naming what cannot be taken. The GIL must be held.
ArrayNest nest_from_python(py::handle object);

// Tuples, and dicts in key order, of torch tensors where torch is installed, else of numpy arrays; they share the
// Arrays' memory and keep it alive. The GIL must be held.
py::object nest_to_python(const ArrayNest& nest);

// Called once, by the module: learns which thread runs signal handlers, in forked children too.
void watch_main_thread();

// The next three are without_gil()'s.
bool on_main_thread();                       // Python's: the one that runs signal handlers
void take_gil_again(PyThreadState* thread);  // does not return in a daemon thread while the interpreter shuts down
void free_released_objects();                // decrements what threads without the GIL let go of; GIL held

// Returns function(interrupt), called without the GIL; `interrupt` throws when a signal handler raised (Ctrl-C), and
// that exception is the one that comes out. Every call that may block or copy much goes through here.
template <typename Function>
auto without_gil(Function&& function) {
  using Result = std::invoke_result_t<Function, const Interrupt&>;
  struct SignalHandlerRaised {};

  PyThreadState* const thread = PyEval_SaveThread();
  Interrupt interrupt;  // stays empty in other threads: they run no signal handlers
  if (on_main_thread()) {
    interrupt = [thread] {
      PyEval_RestoreThread(thread);
      const bool raised = PyErr_CheckSignals() != 0;
      if (!raised) free_released_objects();
      PyEval_SaveThread();
      if (raised) throw SignalHandlerRaised();
    };
  }
  // The GIL is not taken in a destructor: a thread that ends in there (interpreter shutdown) would end the process.
  std::exception_ptr error;
  std::conditional_t<std::is_void_v<Result>, bool, std::optional<Result>> result{};
  try {
    if constexpr (std::is_void_v<Result>) {
      function(interrupt);
    } else {
      result.emplace(function(interrupt));
    }
  } catch (...) {
    error = std::current_exception();
  }
  take_gil_again(thread);
  if (PyErr_Occurred()) throw py::error_already_set();
  free_released_objects();
  if (error) std::rethrow_exception(error);
  if constexpr (!std::is_void_v<Result>) return std::move(*result);
}

}  // namespace beast
