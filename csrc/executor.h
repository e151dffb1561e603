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
    for (size_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
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
  std::condition_variable came_;
  std::deque<Task> tasks_;
  size_t num_waiting_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace beast
