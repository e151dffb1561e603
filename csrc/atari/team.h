// A fixed team of threads for many short tasks: one wake-up per thread and task, and no allocation.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace beast::atari {

// Runs a task on `size` threads at once, as task(context, member) for every member in [0, size). Tasks do not throw.
class Team {
 public:
  using Task = void (*)(void* context, int member);

  explicit Team(int size) : size_(size) {
    threads_.reserve(size);
    try {
      for (int member = 1; member < size; ++member) threads_.emplace_back([this, member] { serve(member, 0); });
    } catch (...) {  // the system has no more threads
      end();
      throw;
    }
  }
  ~Team() { end(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // After a fork the child has the object but not the threads.
  bool lost_threads() const { return !threads_.empty() && process_ != getpid(); }

  // Runs the task and returns when it is done; the calling thread is member 0.
  void run(Task task, void* context) {
    if (size_ > 1) begin(task, context, false);
    task(context, 0);
    if (size_ > 1) wait();
  }

  // Starts the task on the team's own threads and returns at once; wait() has to follow before the next task.
  void start(Task task, void* context) {
    if (!has_thread_0_) {
      process_ = getpid();
      threads_.emplace_back([this, task_number = task_number_] { serve(0, task_number); });
      has_thread_0_ = true;
    }
    begin(task, context, true);
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // `with_first`: member 0 is a thread of the team (start()), not the caller (run()).
  void begin(Task task, void* context, bool with_first) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      with_first_ = with_first;
      running_ = with_first ? size_ : size_ - 1;
      ++task_number_;
    }
    wake_.notify_all();
  }

  void serve(int member, unsigned long seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return is_over_ || (task_number_ != seen && (member > 0 || with_first_)); });
      if (is_over_) return;
      seen = task_number_;
      const Task task = task_;
      void* const context = context_;
      lock.unlock();
      task(context, member);
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  const int size_;
  pid_t process_ = getpid();  // where the threads are
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  unsigned long task_number_ = 0;
  int running_ = 0;
  bool with_first_ = false, has_thread_0_ = false, is_over_ = false;
};

}  // namespace beast::atari
