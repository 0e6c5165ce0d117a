// Typed failures: what was tried, where, and what the kernel said.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

namespace infinity {

// "4 MiB", "1.50 GiB", "100 B": exact counts without decimals, all others with two.
std::string format_bytes(int64_t bytes);

// "EIO (Input/output error)" for a positive errno value.
std::string format_errno(int error_number);

// One failed operation as plain data: a transfer keeps it for its waits, and the binding turns it into IoError.
struct Failure {
  int error_number = 0;  // positive errno value; ENODATA where a file ends too early, EBADMSG where a checksum fails
  const char* operation = "";  // "read", "write", "open", "reserve", "sync", "setup"; always a string literal
  std::string path;            // file concerned, or empty
  int64_t offset = 0;          // bytes, of the whole transfer
  int64_t length = 0;          // bytes, of the whole transfer
  std::string backend;         // backend that ran it, or empty
  std::string reason;          // in place of the errno's own text, or empty
  int64_t wrong_page = -1;     // of a read with EBADMSG: offset in the file of the page that failed its checksum

  // "read 4 MiB at offset 12884901888 of /x/rank0.arena: EIO (Input/output error), backend io_uring"
  std::string message() const;
};

// Thrown for every Failure; infinity.errors.IoError in Python.
class IoFailure : public std::runtime_error {
 public:
  explicit IoFailure(Failure failure) : std::runtime_error(failure.message()), failure_(std::move(failure)) {}

  const Failure& failure() const noexcept { return failure_; }

 private:
  Failure failure_;
};

// Memory that can't be had, with its size in words; MemoryError in Python.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& message) : message_(message) {}

  const char* what() const noexcept override { return message_.what(); }

 private:
  std::runtime_error message_;  // copies without throwing, as an exception must
};

}  // namespace infinity
