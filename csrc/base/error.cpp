// Bytes, errno values and failures in words.
#include "base/error.h"

#include <cstdio>
#include <system_error>

// In glibc from 2.32 on; elsewhere the number stands in a name's place.
extern "C" __attribute__((weak)) const char* strerrorname_np(int error_number) noexcept;

namespace infinity {

std::string format_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  int64_t factor = 1;
  while (unit < 4 && bytes >= factor * 1024) {
    factor *= 1024;
    ++unit;
  }
  if (bytes % factor == 0) return std::to_string(bytes / factor) + " " + kUnits[unit];
  char text[64];
  std::snprintf(text, sizeof text, "%.2f %s", static_cast<double>(bytes) / static_cast<double>(factor), kUnits[unit]);
  return text;
}

std::string format_errno(int error_number) {
  const char* name = strerrorname_np != nullptr ? strerrorname_np(error_number) : nullptr;
  std::string text = name != nullptr ? name : "errno " + std::to_string(error_number);
  return text + " (" + std::generic_category().message(error_number) + ")";
}

std::string Failure::message() const {
  std::string text = operation;
  if (length > 0) text += " " + format_bytes(length) + " at offset " + std::to_string(offset) + " of";
  if (!path.empty()) text += " " + path;
  text += ": " + (reason.empty() ? format_errno(error_number) : reason);
  if (!backend.empty()) text += ", backend " + backend;
  return text;
}

}  // namespace infinity
