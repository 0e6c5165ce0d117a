// Bytes, errno values and failures in words.
#include "base/error.h"

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace infinity {
namespace {

// The names of the errors that storage, memory limits and sandboxes give; glibc's own table is newer than some systems.
const char* errno_name(int error_number) {
  switch (error_number) {
#define INFINITY_NAME(name) \
  case name:                \
    return #name
    INFINITY_NAME(EPERM);
    INFINITY_NAME(ENOENT);
    INFINITY_NAME(EINTR);
    INFINITY_NAME(EIO);
    INFINITY_NAME(ENXIO);
    INFINITY_NAME(EBADF);
    INFINITY_NAME(EAGAIN);
    INFINITY_NAME(ENOMEM);
    INFINITY_NAME(EACCES);
    INFINITY_NAME(EFAULT);
    INFINITY_NAME(EBUSY);
    INFINITY_NAME(EEXIST);
    INFINITY_NAME(ENODEV);
    INFINITY_NAME(ENOTDIR);
    INFINITY_NAME(EISDIR);
    INFINITY_NAME(EINVAL);
    INFINITY_NAME(ENFILE);
    INFINITY_NAME(EMFILE);
    INFINITY_NAME(EFBIG);
    INFINITY_NAME(ENOSPC);
    INFINITY_NAME(ESPIPE);
    INFINITY_NAME(EROFS);
    INFINITY_NAME(ENOSYS);
    INFINITY_NAME(ELOOP);
    INFINITY_NAME(ENODATA);
    INFINITY_NAME(ETIME);
    INFINITY_NAME(ENOLINK);
    INFINITY_NAME(EOVERFLOW);
    INFINITY_NAME(EILSEQ);
    INFINITY_NAME(EBADMSG);
    INFINITY_NAME(EOPNOTSUPP);
    INFINITY_NAME(ENOBUFS);
    INFINITY_NAME(ETIMEDOUT);
    INFINITY_NAME(ESTALE);
    INFINITY_NAME(EDQUOT);
    INFINITY_NAME(ECANCELED);
    INFINITY_NAME(EREMOTEIO);
    INFINITY_NAME(ENAMETOOLONG);
    INFINITY_NAME(ETXTBSY);
#undef INFINITY_NAME
    default:
      return nullptr;
  }
}

}  // namespace

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
  const char* name = errno_name(error_number);
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
