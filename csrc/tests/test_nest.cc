#include "nest.h"

#include <gtest/gtest.h>

namespace beast {
namespace {

using Numbers = Nest<int>;

Numbers example() {
  return Numbers(Numbers::Tuple{
      Numbers(1), Numbers(Numbers::Dict{{"b", Numbers(3)}, {"a", Numbers(Numbers::Tuple{Numbers(2)})}}), Numbers()});
}

TEST(Nest, LeavesComeByIndexAndByKey) {
  EXPECT_EQ(example().flatten(), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(example().front(), 1);
}

TEST(Nest, MapKeepsTheStructureAndMayChangeTheType) {
  const Nest<std::string> text = example().map([](int number) { return std::to_string(10 * number); });
  EXPECT_EQ(text.flatten(), (std::vector<std::string>{"10", "20", "30"}));
  EXPECT_EQ(text.tuple()[1].dict().at("a").tuple()[0].leaf(), "20");
  EXPECT_TRUE(text.tuple()[2].is_tuple() && text.tuple()[2].tuple().empty());
}

TEST(Nest, PackAsUndoesFlatten) {
  EXPECT_EQ(example().pack_as(std::vector<double>{1.5, 2.5, 3.5}).tuple()[1].dict().at("b").leaf(), 3.5);
  EXPECT_THROW(example().pack_as(std::vector<int>{1, 2}), std::invalid_argument);
  EXPECT_THROW(example().pack_as(std::vector<int>{1, 2, 3, 4}), std::invalid_argument);
}

TEST(Nest, WithoutALeafThereIsNoFront) {
  EXPECT_THROW(Numbers().front(), std::invalid_argument);
  EXPECT_EQ(Numbers(7).front(), 7);
}

}  // namespace
}  // namespace beast
