// Helpers of the bindings: converting nests to and from Python, the GIL, Ctrl-C. Only the binding files include this.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <optional>
#include <type_traits>

#include "batching.h"

namespace beast {

namespace py = pybind11;

// Takes tuples, lists and dicts with str keys. Leaves are numpy arrays, torch tensors on the CPU, objects with the
// buffer protocol or `__dlpack__`, and Python and numpy scalars (0-d arrays). Shares their memory if it is writable and
// C-contiguous, else copies it. Throws TypeError or ValueError with the name of what it cannot take. Needs the GIL.
ArrayNest nest_from_python(py::handle object);

// Returns tuples, and dicts in key order, of torch tensors, or of numpy arrays if torch is not installed. They share
// the Arrays' memory and keep it alive. Needs the GIL.
py::object nest_to_python(const ArrayNest& nest);

// Finds out which thread runs signal handlers, here and in forked children. The module calls it once.
void watch_main_thread();

// The next three are for without_gil().
bool on_main_thread();                       // the thread that runs Python's signal handlers
void take_gil_again(PyThreadState* thread);  // does not return in a daemon thread while the interpreter shuts down
void free_released_objects();                // those that threads without the GIL have released; needs the GIL

// How many forks lie between this process and the one that imported the module. A forked child has not the threads of
// its parent, and what they held locked stays locked: objects of an older generation are left alone there.
int generation();

// Owns an object that other threads wait in. A forked child does not destroy it, which might wait for these threads.
template <typename T>
std::shared_ptr<T> shared_here(T* object) {
  return std::shared_ptr<T>(object, [made_in = generation()](T* p) {
    if (made_in == generation()) delete p;
  });
}

// Calls function(interrupt) without the GIL and returns its result. `interrupt` throws if a signal handler has raised
// an exception (Ctrl-C), and without_gil() then throws that exception. Every call that may block or copies much memory
// goes through here.
template <typename Function>
auto without_gil(Function&& function) {
  using Result = std::invoke_result_t<Function, const Interrupt&>;
  struct SignalHandlerRaised {};

  PyThreadState* const thread = PyEval_SaveThread();
  Interrupt interrupt;  // stays empty in other threads, which run no signal handlers
  // What a handler raised. Kept here, as Python code may run before function() returns: a log, say.
  std::optional<py::error_already_set> raised;
  if (on_main_thread()) {
    interrupt = [thread, &raised] {
      PyEval_RestoreThread(thread);
      if (PyErr_CheckSignals() != 0) {
        raised.emplace();
      } else {
        free_released_objects();
      }
      PyEval_SaveThread();
      if (raised) throw SignalHandlerRaised();
    };
  }
  // Not in a destructor: if taking the GIL ends the thread (interpreter shutdown), that would end the process.
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
  if (raised) throw py::error_already_set(*raised);
  free_released_objects();
  if (error) std::rethrow_exception(error);
  if constexpr (!std::is_void_v<Result>) return std::move(*result);
}

}  // namespace beast
