// Executor: a few threads that run tasks in order of arrival.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace beast {

class Executor {
 public:
  using Task = std::function<void()>;  // may not throw

  explicit Executor(size_t num_threads) {
    try {
      for (size_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
    } catch (...) {  // the process may have no more threads
      stop();
      throw;
    }
  }
  ~Executor() { stop(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void post(Task task) {  // from any thread; after stop() it does nothing
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    tasks_.push_back(std::move(task));
    if (num_waiting_ > 0) came_.notify_one();
  }

  void run_here(const Task& task) {  // in the calling thread; after stop() it does nothing
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      ++num_here_;
    }
    task();
    std::lock_guard<std::mutex> lock(mutex_);
    if (--num_here_ == 0) ended_here_.notify_all();
  }

  void stop() {  // drops the tasks that have not begun, and waits for the others
    std::deque<Task> dropped;  // freed after the lock is released
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      dropped.swap(tasks_);
      came_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    std::unique_lock<std::mutex> lock(mutex_);
    ended_here_.wait(lock, [this] { return num_here_ == 0; });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      if (tasks_.empty()) {
        ++num_waiting_;
        came_.wait(lock);
        --num_waiting_;
        continue;
      }
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // what it holds is freed without the lock
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable came_, ended_here_;
  std::deque<Task> tasks_;
  size_t num_waiting_ = 0;  // threads without a task
  size_t num_here_ = 0;     // tasks in run_here()
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace beast
