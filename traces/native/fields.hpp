// Validation of the fields of a memory snapshot, and the faults of invalid fields.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "records.hpp"

namespace traces {

// An invalid event or segment: the kind of fault, of which there are few, and the reason, which includes the
// values.
struct Fault {
  std::string kind, reason;
  explicit Fault(std::string kind) : kind(kind), reason(std::move(kind)) {}
  Fault(std::string kind, std::string reason) : kind(std::move(kind)), reason(std::move(reason)) {}
};

// Equals traces.columns.LARGEST // 1024: times are multiplied by 1000.
constexpr int64_t kLargestField = int64_t{1} << 52;

inline const char* type_of(const Records& records, Value value) {
  switch (value.kind()) {
    case Value::kMissing: return "nothing";
    case Value::kNone: return "None";
    case Value::kBool: return "a boolean";
    case Value::kNumber: case Value::kLarge: return "a number";
    case Value::kFloat: return "a float";
    case Value::kText: case Value::kLongText: return "a text";
    case Value::kBytes: return "bytes";
    case Value::kTuple: return "a tuple";
    case Value::kSet: return "a set";
    case Value::kObject: break;
  }
  return records.has_shape(value, Records::kList) || records.has_shape(value, Records::kStack) ? "a list" : "a dict";
}

inline std::string shown(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, 40)) result += c >= ' ' && c <= '~' ? c : '?';
  return result;
}

// Returns an address, a size, a time or a stream.
inline int64_t number_of(const Records& records, Value value, const std::string& name) {
  if (value.is(Value::kMissing)) throw Fault(name + " is missing");
  if (value.is(Value::kText)) {
    const std::string text = shown(records.texts[static_cast<size_t>(value.payload())]);
    throw Fault(name + " is not a number", name + " is '" + text + "', not a number");
  }
  if (!value.is(Value::kNumber) && !value.is(Value::kLarge))
    throw Fault(name + " is not a number", name + " is " + type_of(records, value) + ", not a number");
  const std::string kind = name + " is out of range";
  if (value.is(Value::kLarge)) throw Fault(kind);
  const int64_t number = value.payload();
  if (number < 0 || number > kLargestField) throw Fault(kind, name + ' ' + std::to_string(number) + " is out of range");
  return number;
}

[[noreturn]] inline void misplaced(const Records& records, Value value, const char* belongs) {
  throw Fault(std::string("no ") + belongs + " where one belongs",
              std::string(type_of(records, value)) + " where a " + belongs + " belongs");
}

inline Records::Items list_of(const Records& records, Value value) {
  if (records.is_empty_stack(value)) return {};
  if (records.has_shape(value, Records::kStack)) throw Fault("a stack", "a stack of frames where another list belongs");
  if (!records.has_shape(value, Records::kList)) misplaced(records, value, "list");
  return records.items(value);
}

inline Fields dict_of(const Records& records, Value value) {
  if (!records.has_shape(value, Records::kDict)) misplaced(records, value, "dict");
  return records.fields(value);
}

}  // namespace traces
