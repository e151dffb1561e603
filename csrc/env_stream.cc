#include "env_stream.h"

#include "wire.h"

namespace beast {
namespace {

constexpr size_t kMaxShown = 300;  // bytes of a value that another host sent

std::string shown(const std::string& text) {
  return readable(text.substr(0, kMaxShown)) + (text.size() > kMaxShown ? "…" : "");
}

}  // namespace

std::string describe(const Field& field) {
  return field.name + " " + dtype_name(field.dtype) + " " + to_string(field.shape);
}

std::string difference(const StreamSpec& spec, const StreamSpec& expected) {
  const auto instead = [](const std::string& a, const std::string& b) { return shown(a) + " instead of " + shown(b); };
  const auto quoted = [](const std::string& text) { return "\"" + text + "\""; };
  if (spec.env != expected.env) return instead("environment " + quoted(spec.env), quoted(expected.env));
  if (spec.num_envs != expected.num_envs) {
    return instead(std::to_string(spec.num_envs) + " environments", std::to_string(expected.num_envs));
  }
  if (spec.frames_per_step != expected.frames_per_step) {
    return instead(std::to_string(spec.frames_per_step) + " frames a step", std::to_string(expected.frames_per_step));
  }
  if (spec.observation_space != expected.observation_space) {
    return instead("the observation space " + spec.observation_space, expected.observation_space);
  }
  if (spec.action_space != expected.action_space) {
    return instead("the action space " + spec.action_space, expected.action_space);
  }
  if (spec.fields.size() != expected.fields.size()) {
    return instead(std::to_string(spec.fields.size()) + " fields", std::to_string(expected.fields.size()));
  }
  for (size_t i = 0; i < spec.fields.size(); ++i) {
    if (spec.fields[i] == expected.fields[i]) continue;
    return instead("the field " + describe(spec.fields[i]), describe(expected.fields[i]));
  }
  if (!(spec.observation == expected.observation)) return "an observation that is nested in another way";
  // A server need not call it "action".
  const auto action = [](const StreamSpec& s) {
    return s.takes_any_action ? "any actions" : describe({"action", s.action.dtype, s.action.shape});
  };
  if (action(spec) != action(expected)) return instead(action(spec), action(expected));
  return "";
}

}  // namespace beast
