// The queues with many threads, for the sanitizers. The Python tests cover their public behaviour.
#include "batching.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <numeric>
#include <thread>
#include <utility>

#include "executor.h"

namespace beast {
namespace {

using std::chrono::milliseconds;

const Interrupt kNever;

// int64 [count, 1]: first, first + 1, …
Array rows(int64_t first, int64_t count = 1) {
  Array array = Array::allocate(DType::kInt64, {count, 1});
  auto* items = reinterpret_cast<int64_t*>(array.data());
  std::iota(items, items + count, first);
  return array;
}

std::vector<int64_t> values(const ArrayNest& nest) {
  const Array& array = nest.front();
  const auto* begin = reinterpret_cast<const int64_t*>(array.data());
  return {begin, begin + num_items(array.shape())};
}

BatchingOptions options(int64_t minimum, int64_t maximum) {
  BatchingOptions options;
  options.batch_dim = 0;
  options.minimum_batch_size = minimum;
  options.maximum_batch_size = maximum;
  return options;
}

template <typename Condition>
void wait_until(Condition&& condition) {
  while (!condition()) std::this_thread::yield();
}

TEST(BatchingQueue, NoRowIsLostOrDoubledAmongProducersAndConsumers) {
  constexpr int64_t kProducers = 4, kItems = 300, kWidth = 5;
  BatchingOptions bounded = options(3, 7);
  bounded.maximum_queue_size = 15;
  bounded.timeout = milliseconds(1);
  BatchingQueue queue(bounded);

  std::vector<std::thread> producers, consumers;
  for (int64_t producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&queue, producer] {
      for (int64_t item = 0; item < kItems; ++item) {
        queue.enqueue(rows((producer * kItems + item) * kWidth, kWidth), kNever);
      }
    });
  }
  std::vector<std::atomic<int>> seen(kProducers * kItems * kWidth);
  for (int consumer = 0; consumer < 3; ++consumer) {
    consumers.emplace_back([&] {
      try {
        for (;;) {
          const std::vector<int64_t> batch = values(*queue.dequeue(kNever));
          EXPECT_LE(batch.size(), 7u);
          EXPECT_GE(queue.size(), 0);
          for (int64_t value : batch) ++seen[value];
        }
      } catch (const ClosedBatchingQueue&) {
      }
    });
  }
  for (std::thread& thread : producers) thread.join();
  wait_until([&] { return queue.size() == 0; });
  queue.close();
  for (std::thread& thread : consumers) thread.join();
  for (size_t value = 0; value < seen.size(); ++value) ASSERT_EQ(seen[value], 1) << value;
}

TEST(BatchingQueue, ClosingWakesBothSides) {
  BatchingOptions bounded = options(2, 2);
  bounded.maximum_queue_size = 2;
  for (int round = 0; round < 50; ++round) {
    BatchingQueue full(bounded), empty(bounded);
    full.enqueue(rows(0, 2), kNever);
    std::thread producer([&] { EXPECT_THROW(full.enqueue(rows(2), kNever), ClosedBatchingQueue); });
    std::thread consumer([&] { EXPECT_THROW(empty.dequeue(kNever), ClosedBatchingQueue); });
    full.close();
    empty.close();
    producer.join();
    consumer.join();
    EXPECT_THROW(full.close(), std::runtime_error);
  }
}

TEST(BatchingQueue, AnInterruptedProducerGivesItsTurnToTheNext) {
  BatchingOptions bounded = options(1, 1);
  bounded.maximum_queue_size = 1;
  BatchingQueue queue(bounded);
  queue.enqueue(rows(0), kNever);
  struct Stop {};
  std::atomic<bool> stop{false};
  std::thread first([&] {
    EXPECT_THROW(queue.enqueue(rows(1),
                               [&] {
                                 if (stop) throw Stop();
                               }),
                 Stop);
  });
  std::this_thread::sleep_for(milliseconds(50));
  std::thread second([&] { queue.enqueue(rows(2), kNever); });
  std::this_thread::sleep_for(milliseconds(50));
  stop = true;
  first.join();
  EXPECT_EQ(values(*queue.dequeue(kNever)), std::vector<int64_t>{0});
  second.join();
  EXPECT_EQ(values(*queue.dequeue(kNever)), std::vector<int64_t>{2});
}

TEST(BatchingQueue, AnInterruptEndsAWaitAndIsAskedWithoutTheLock) {
  BatchingQueue queue(options(1, 1));
  struct Stop {};
  int asked = 0;
  const auto begin = std::chrono::steady_clock::now();
  const Interrupt stop_at_the_third = [&] {
    EXPECT_EQ(queue.size(), 0);  // would deadlock if the wait held the lock
    if (++asked == 3) throw Stop();
  };
  EXPECT_THROW(queue.dequeue(stop_at_the_third), Stop);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(250));
  queue.enqueue(rows(5), kNever);
  EXPECT_EQ(values(*queue.dequeue(kNever)), std::vector<int64_t>{5});
}

TEST(BatchingQueue, AConsumerThatGivesUpLeavesTheRowsOfABatchThatIsNotFull) {
  BatchingQueue queue(options(2, 2));
  const milliseconds timeout(20);
  EXPECT_FALSE(queue.dequeue(kNever, timeout));
  queue.enqueue(rows(5), kNever);
  EXPECT_FALSE(queue.dequeue(kNever, timeout));
  EXPECT_EQ(queue.size(), 1);
  auto patient = std::async(std::launch::async, [&] { return queue.dequeue(kNever); });
  EXPECT_FALSE(queue.dequeue(kNever, timeout)) << "beside one that waits on";
  queue.enqueue(rows(6), kNever);
  EXPECT_EQ(values(*patient.get()), (std::vector<int64_t>{5, 6}));
  queue.enqueue(rows(7, 2), kNever);
  EXPECT_EQ(values(*queue.dequeue(kNever, milliseconds(0))), (std::vector<int64_t>{7, 8}));
  queue.close();
  EXPECT_THROW(queue.dequeue(kNever, timeout), ClosedBatchingQueue);
}

TEST(BatchingQueue, ATimeoutThatAnInterruptedConsumerWatchedIsWatchedByAnother) {
  for (int round = 0; round < 3; ++round) {
    BatchingOptions slow = options(100, 100);
    slow.timeout = milliseconds(1000);
    BatchingQueue queue(slow);
    struct Stop {};
    std::atomic<int> asked{0};
    std::atomic<bool> stop{false};
    auto interrupted = std::async(std::launch::async, [&] {
      EXPECT_THROW(queue.dequeue([&] {
        ++asked;
        if (stop) throw Stop();
      }),
                   Stop);
    });
    wait_until([&] { return asked > 0; });
    auto other = std::async(std::launch::async, [&] { return values(*queue.dequeue(kNever)); });
    std::this_thread::sleep_for(milliseconds(20));  // it waits now; enqueue() will most often wake the other
    stop = true;
    queue.enqueue(rows(1), kNever);
    interrupted.get();
    EXPECT_EQ(other.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    if (queue.size()) queue.close();  // a failure must not hang here
    EXPECT_EQ(other.get(), std::vector<int64_t>{1});
  }
}

TEST(BatchingQueue, AnItemThatIsABatchIsNotCopied) {
  BatchingQueue queue(options(1, 4));
  const Array item = rows(0, 4);
  queue.enqueue(item, kNever);
  EXPECT_EQ(queue.dequeue(kNever)->leaf().data(), item.data());
}

TEST(BatchingQueue, AsTorchBeastABatchHasItsOwnMemoryAndAnItemMayCountAsOne) {
  BatchingOptions torchbeast = options(2, 2);
  torchbeast.as_torchbeast = true;
  BatchingQueue queue(torchbeast);
  const Array pair = rows(0, 2);
  queue.enqueue(pair, kNever);  // a pool's item: two rows are a batch
  const ArrayNest batch = *queue.dequeue(kNever);
  EXPECT_EQ(values(batch), (std::vector<int64_t>{0, 1}));
  EXPECT_NE(batch.leaf().data(), pair.data());

  for (int64_t count : {3, 1}) queue.enqueue(rows(10 * count, count), kNever, Counts::kAsOne);
  EXPECT_EQ(queue.size(), 2);
  EXPECT_EQ(values(*queue.dequeue(kNever)), (std::vector<int64_t>{30, 31, 32, 10}));
}

TEST(DynamicBatcher, AsTorchBeastManyCallersOfWholeItemsGetARowEach) {
  BatchingOptions torchbeast = options(1, 4);
  torchbeast.as_torchbeast = true;
  DynamicBatcher batcher(torchbeast);
  std::thread consumer([&] {
    try {
      for (;;) {
        const auto batch = batcher.next(kNever);
        EXPECT_THROW(batch->set_outputs(rows(0, 5)), std::invalid_argument);
        std::vector<int64_t> firsts;  // an item is (first, first + 1, first + 2)
        const std::vector<int64_t> inputs = values(batch->inputs());
        for (size_t i = 0; i < inputs.size(); i += 3) firsts.push_back(inputs[i]);
        Array outputs = Array::allocate(DType::kInt64, {static_cast<int64_t>(firsts.size()), 1});
        for (size_t i = 0; i < firsts.size(); ++i) reinterpret_cast<int64_t*>(outputs.data())[i] = 3 * firsts[i];
        batch->set_outputs(outputs);
      }
    } catch (const ClosedBatchingQueue&) {
    }
  });
  std::vector<std::thread> callers;
  for (int64_t caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&batcher, caller] {
      for (int64_t number = 0; number < 100; ++number) {
        const int64_t first = 1000 * caller + number;
        const ArrayNest answer = batcher.compute(rows(first, 3), kNever, milliseconds(60'000), Counts::kAsOne);
        ASSERT_EQ(values(answer), std::vector<int64_t>{3 * first});
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  batcher.close();
  consumer.join();
}

TEST(DynamicBatcher, EveryCallerGetsItsOwnRows) {
  BatchingOptions quick = options(2, 8);
  quick.timeout = milliseconds(1);  // the last caller is alone below the minimum
  DynamicBatcher batcher(quick);
  std::vector<std::thread> consumers, callers;
  for (int consumer = 0; consumer < 2; ++consumer) {
    consumers.emplace_back([&] {
      try {
        for (;;) {
          const auto batch = batcher.next(kNever);
          const std::vector<int64_t> inputs = values(batch->inputs());
          Array outputs = Array::allocate(DType::kInt64, {static_cast<int64_t>(inputs.size()), 1});
          for (size_t i = 0; i < inputs.size(); ++i) reinterpret_cast<int64_t*>(outputs.data())[i] = 3 * inputs[i];
          batch->set_outputs(outputs);
        }
      } catch (const ClosedBatchingQueue&) {
      }
    });
  }
  for (int64_t caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&batcher, caller] {
      for (int64_t number = 0; number < 200; ++number) {
        const int64_t first = 1000 * caller + number, count = 1 + number % 3;
        const std::vector<int64_t> outputs = values(batcher.compute(rows(first, count), kNever));
        ASSERT_EQ(static_cast<int64_t>(outputs.size()), count);
        for (int64_t i = 0; i < count; ++i) ASSERT_EQ(outputs[i], 3 * (first + i));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  batcher.close();
  for (std::thread& consumer : consumers) consumer.join();
}

TEST(DynamicBatcher, ClosingAmidCallsLeavesNobodyWaiting) {
  for (int round = 0; round < 50; ++round) {
    BatchingOptions quick = options(2, 3);
    quick.timeout = milliseconds(1);
    DynamicBatcher batcher(quick);
    std::vector<std::thread> threads;
    std::atomic<int> answers{0};
    for (int caller = 0; caller < 4; ++caller) {
      threads.emplace_back([&] {
        try {
          for (;;) {
            batcher.compute(rows(1), kNever);
            ++answers;
          }
        } catch (const ClosedBatchingQueue&) {
        }
      });
    }
    for (int consumer = 0; consumer < 2; ++consumer) {
      threads.emplace_back([&] {
        try {
          for (;;) {
            const auto batch = batcher.next(kNever);
            batch->set_outputs(batch->inputs());
          }
        } catch (const ClosedBatchingQueue&) {
        }
      });
    }
    wait_until([&] { return answers > round; });
    batcher.close();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(batcher.size(), 0);
  }
}

TEST(DynamicBatcher, AnInterruptedOrTimedOutCallLeavesNothingBehind) {
  DynamicBatcher batcher(options(1, 1));
  struct Stop {};
  const Interrupt stop = [] { throw Stop(); };
  EXPECT_THROW(batcher.compute(rows(1), stop), Stop);
  EXPECT_THROW(batcher.compute(rows(1), kNever, milliseconds(10)), TimeoutError);
  EXPECT_EQ(batcher.size(), 0);
}

TEST(DynamicBatcher, ABatchMayOutliveItsBatcherAndItsCallers) {
  std::shared_ptr<Batch> batch;
  {
    DynamicBatcher batcher(options(1, 1));
    std::thread caller([&] { EXPECT_THROW(batcher.compute(rows(7), kNever), ClosedBatchingQueue); });
    batch = batcher.next(kNever);
    batcher.close();
    caller.join();
  }
  EXPECT_EQ(values(batch->inputs()), std::vector<int64_t>{7});
  batch->set_outputs(rows(7));
  EXPECT_THROW(batch->set_outputs(rows(7)), std::runtime_error);
}

TEST(DynamicBatcher, TheLastAnswerOfABatchSaysSoInTheThreadThatAnswers) {
  DynamicBatcher batcher(options(3, 3));
  std::vector<std::pair<int64_t, bool>> answers;  // value, is_last
  std::vector<std::thread::id> threads;
  for (int64_t row = 0; row < 4; ++row) {
    batcher.compute_later(rows(row), [&](ArrayNest outputs, std::exception_ptr failure, bool is_last) {
      answers.emplace_back(failure ? -1 : values(outputs)[0], is_last);
      threads.push_back(std::this_thread::get_id());
    });
  }
  const auto batch = batcher.next(kNever);
  batch->set_outputs(batch->inputs());
  batcher.close();  // which ends the fourth
  EXPECT_EQ(answers, (std::vector<std::pair<int64_t, bool>>{{0, false}, {1, false}, {2, true}, {-1, false}}));
  EXPECT_EQ(threads, std::vector<std::thread::id>(4, std::this_thread::get_id()));
}

TEST(Executor, StopWaitsForATaskInACallersThreadAndRefusesLaterOnes) {
  Executor executor(1);
  std::atomic<bool> began{false}, ended{false}, stopped{false};
  std::thread caller([&] {
    executor.run_here([&] {
      began = true;
      std::this_thread::sleep_for(milliseconds(100));
      EXPECT_FALSE(stopped);
      ended = true;
    });
  });
  wait_until([&] { return began.load(); });
  executor.stop();
  stopped = true;
  EXPECT_TRUE(ended);
  caller.join();
  executor.run_here([] { FAIL() << "a task ran after stop()"; });
}

TEST(DynamicBatcher, AnswersFromSeveralThreadsCountOnce) {
  DynamicBatcher batcher(options(1, 1));
  const ArrayNest outputs = ArrayNest::Tuple(1000, rows(2));  // many leaves: setting them takes a while
  for (int round = 0; round < 300; ++round) {
    auto answer = std::async(std::launch::async, [&] { return values(batcher.compute(rows(1), kNever)); });
    const auto batch = batcher.next(kNever);
    std::atomic<int> refused{0}, ready{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        ++ready;
        wait_until([&] { return ready == 3; });
        try {
          batch->set_outputs(outputs);
        } catch (const std::runtime_error&) {
          ++refused;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(refused, 2);
    EXPECT_EQ(answer.get(), std::vector<int64_t>{2});
  }
}

}  // namespace
}  // namespace beast
