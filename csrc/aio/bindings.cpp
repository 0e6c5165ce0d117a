// The Python names of the core: argument checks, exceptions and the GIL. Rules: what may wait releases the GIL, what
// may wait for long looks for signals ten times a second, and no I/O thread ever enters Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "aio/engine.h"
#include "aio/file.h"
#include "base/crc32c.h"

namespace py = pybind11;

namespace infinity::aio {

// Changes the options of every engine that Python makes; empty unless a test build sets it.
using ChangeOptions = std::function<void(EngineOptions& options)>;

// A test build links tests/csrc/faulty, which defines this: it adds functions to the module that set `change_options`.
[[gnu::weak]] void bind_faults(py::module_& module, ChangeOptions& change_options);

namespace {

ChangeOptions change_options;

constexpr std::chrono::milliseconds kSignalInterval{100};

// Text that may hold a path, which is bytes to the kernel.
py::str decode(const std::string& text) {
  PyObject* decoded = PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

py::list decode_all(const std::vector<std::string>& lines) {
  py::list list;
  for (const std::string& line : lines) list.append(decode(line));
  return list;
}

// infinity.errors.IoError or IntegrityError, imported when first needed so that this module stands below every other.
void raise_io_error(const IoFailure& error) {
  const Failure& failure = error.failure();
  bool wrong = failure.wrong_page >= 0;
  py::object type = py::module_::import("infinity.errors").attr(wrong ? "IntegrityError" : "IoError");
  py::object value = type(decode(error.what()), failure.error_number, failure.operation, decode(failure.path),
                          failure.offset, failure.length, failure.backend);
  if (wrong) value.attr("page_offset") = failure.wrong_page;
  PyErr_SetObject(type.ptr(), value.ptr());
}

// Calls `wait_a_little` without the GIL until it returns true; Ctrl-C raises in between.
template <typename WaitALittle>
void wait_with_signals(WaitALittle wait_a_little) {
  while (true) {
    {
      py::gil_scoped_release release;
      if (wait_a_little(kSignalInterval)) return;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

void wait_for_transfer(Transfer& transfer, bool with_team) {
  if (!transfer.done()) {
    wait_with_signals([&transfer, with_team](std::chrono::milliseconds limit) {
      return with_team ? transfer.wait_with_team_for(limit) : transfer.wait_for(limit);
    });
  }
  transfer.throw_if_failed();
}

void drain_engine(Engine& engine) {
  wait_with_signals([&engine](std::chrono::milliseconds limit) { return engine.drain_for(limit); });
}

void close_engine(Engine& engine) {
  engine.refuse_new();
  drain_engine(engine);
  py::gil_scoped_release release;
  engine.close();
}

// Joins the ring threads without the GIL, as that may take as long as the I/O under way.
struct EngineDeleter {
  void operator()(Engine* engine) const {
    py::gil_scoped_release release;
    delete engine;
  }
};

std::shared_ptr<Engine> make_engine(EngineOptions options) {
  if (change_options) change_options(options);
  std::unique_ptr<Engine> engine;
  {
    py::gil_scoped_release release;
    engine = std::make_unique<Engine>(std::move(options));
  }
  return std::shared_ptr<Engine>(engine.release(), EngineDeleter{});
}

// Of a File or a StripedFile; throws py::cast_error for anything else.
std::shared_ptr<const Volume> volume_of(const py::handle& file) {
  if (py::isinstance<File>(file)) return file.cast<const File&>().volume();
  if (py::isinstance<StripedFile>(file)) return file.cast<const StripedFile&>().volume();
  throw py::cast_error("neither a File nor a StripedFile");
}

Operation operation_of(const std::string& name) {
  if (name == "read") return Operation::kRead;
  if (name == "write") return Operation::kWrite;
  throw py::value_error("the operation must be \"read\" or \"write\", got \"" + name + "\"");
}

Request request_of(const py::handle& item) {
  using Fields = std::tuple<std::string, py::object, int64_t, std::shared_ptr<PinnedSlab>, int64_t, int64_t, Priority>;
  try {
    auto [operation, file, offset, slab, slab_offset, length, priority] = item.cast<Fields>();
    if (slab == nullptr) throw py::cast_error("None");
    return {operation_of(operation), volume_of(file), std::move(slab), {offset, slab_offset, length}, priority};
  } catch (const py::cast_error&) {
    throw py::type_error("a request is (operation, file, offset, slab, slab_offset, length, priority), got " +
                         py::repr(item).cast<std::string>());
  }
}

std::vector<std::shared_ptr<Transfer>> start_batch(Engine& engine, const py::sequence& items, bool sums_by_caller) {
  std::vector<Request> requests;
  requests.reserve(items.size());
  for (const py::handle& item : items) requests.push_back(request_of(item));
  for (Request& request : requests) request.sums_by_caller = sums_by_caller;
  return engine.start_batch(std::move(requests));
}

// Holds what a read has put into the slab against what it must be.
void verify(const Engine& engine, const py::object& file, int64_t offset, const std::shared_ptr<PinnedSlab>& slab,
            int64_t slab_offset, int64_t length) {
  auto volume = volume_of(file);
  Request{Operation::kRead, volume, slab, {offset, slab_offset, length}, Priority::kDemand}.check();
  std::optional<Failure> failure;
  {
    py::gil_scoped_release release;
    failure = volume->first_wrong(slab->data() + slab_offset, offset, length, engine.backend());
  }
  if (failure.has_value()) throw IoFailure(std::move(*failure));
}

py::array_t<Timing> timings_of(Engine& engine) {
  std::vector<Timing> timings = engine.take_timings();
  return py::array_t<Timing>(static_cast<py::ssize_t>(timings.size()), timings.data());
}

py::dict drive_counters_of(const DriveCounters& drive) {
  py::dict dict;
  dict["read_bytes"] = drive.read_bytes;
  dict["written_bytes"] = drive.written_bytes;
  dict["read_seconds"] = drive.read_seconds;
  dict["write_seconds"] = drive.write_seconds;
  dict["in_flight_blocks"] = drive.in_flight_blocks;
  dict["queued_bytes"] = drive.queued_bytes;
  return dict;
}

py::dict counters_of(const Engine& engine) {
  Counters counters = engine.counters();
  py::list drives;
  for (const DriveCounters& drive : counters.drives) drives.append(drive_counters_of(drive));
  py::dict dict;
  dict["drives"] = drives;
  dict["read_bytes"] = counters.read_bytes;
  dict["written_bytes"] = counters.written_bytes;
  dict["read_transfers"] = counters.read_transfers;
  dict["write_transfers"] = counters.write_transfers;
  dict["failed_transfers"] = counters.failed_transfers;
  dict["in_flight_blocks"] = counters.in_flight_blocks;
  dict["queued_bytes"] = counters.queued_bytes;
  dict["resubmitted_blocks"] = counters.resubmitted_blocks;
  return dict;
}

py::buffer_info buffer_of(const PinnedSlab& slab) {
  slab.guard().check("a slab");
  return py::buffer_info(slab.data(), 1, py::format_descriptor<uint8_t>::format(), slab.bytes());
}

// Bytes that lie one behind the other, for as long as it lives; throws py::error_already_set (BufferError) for others.
class Bytes {
 public:
  explicit Bytes(const py::object& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }

  const std::byte* data() const { return static_cast<const std::byte*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

// Sums of pages are little-endian to Python, and to files.
py::bytes packed(const std::vector<PageSum>& sums) {
  std::string text;
  text.reserve(sums.size() * 4);
  for (PageSum sum : sums) {
    for (int shift = 0; shift < 32; shift += 8) text.push_back(static_cast<char>((sum >> shift) & 0xff));
  }
  return text;
}

std::vector<PageSum> unpacked(const Bytes& bytes) {
  if (bytes.size() % 4 != 0)
    throw py::value_error("checksums are 4 bytes per page, got " + std::to_string(bytes.size()));
  std::vector<PageSum> sums(bytes.size() / 4);
  for (size_t i = 0; i < bytes.size(); ++i) sums[i / 4] |= static_cast<PageSum>(bytes.data()[i]) << (8 * (i % 4));
  return sums;
}

py::bytes page_checksums(const py::object& object, const std::string& name) {
  Bytes bytes(object);
  const std::vector<Crc32c>& ways = crc32c_ways();
  auto way = name.empty()
                 ? ways.begin()
                 : std::find_if(ways.begin(), ways.end(), [&name](const Crc32c& one) { return name == one.name; });
  if (way == ways.end()) throw py::value_error("this processor has no way \"" + name + "\"");
  if (bytes.size() % kPageBytes != 0) {
    throw py::value_error("checksums are of whole pages of 4096 bytes, not of " + std::to_string(bytes.size()));
  }
  std::vector<PageSum> sums(bytes.size() / kPageBytes);
  {
    py::gil_scoped_release release;
    sum_pages(bytes.data(), sums.size(), sums.data(), *way);
  }
  return packed(sums);
}

void bind_slab(py::module_& module) {
  py::class_<PinnedSlab, std::shared_ptr<PinnedSlab>>(module, "PinnedSlab", py::buffer_protocol(), py::is_final(),
                                                      "Page-aligned memory for transfers; a writable buffer of bytes.")
      .def(py::init([](int64_t nbytes, bool huge_pages, bool lock, bool in_background) {
             py::gil_scoped_release release;
             return std::make_shared<PinnedSlab>(nbytes, huge_pages, lock, in_background);
           }),
           py::arg("nbytes"), py::kw_only(), py::arg("huge_pages") = true, py::arg("lock") = false,
           py::arg("in_background") = false)
      .def_static(
          "around",
          [](uintptr_t address, int64_t nbytes) {
            return PinnedSlab::around(reinterpret_cast<std::byte*>(address), nbytes);
          },
          py::arg("address"), py::arg("nbytes"))
      .def_buffer(&buffer_of)
      .def_property_readonly("nbytes", &PinnedSlab::bytes)
      .def_property_readonly("address", [](const PinnedSlab& slab) { return reinterpret_cast<uintptr_t>(slab.data()); })
      .def("release", &PinnedSlab::release, py::arg("offset"), py::arg("nbytes"),
           py::call_guard<py::gil_scoped_release>())
      .def("fill_again", &PinnedSlab::fill_again, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("present", &PinnedSlab::is_present)
      .def_property_readonly("huge_pages", &PinnedSlab::huge_pages)
      .def_property_readonly("notes", [](const PinnedSlab& slab) { return decode_all(slab.notes()); });
}

// What a File and a StripedFile have in common.
template <typename AnyFile>
py::class_<AnyFile, std::shared_ptr<AnyFile>> bind_any_file(py::module_& module, const char* name, const char* text) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  return py::class_<AnyFile, std::shared_ptr<AnyFile>>(module, name, py::is_final(), text)
      .def_property_readonly("path", [](const AnyFile& file) { return decode(file.path()); })
      .def_property_readonly("notes", [](const AnyFile& file) { return decode_all(file.notes()); })
      .def_property_readonly("checked", [](const AnyFile& file) { return file.volume()->checked(); })
      .def(
          "checksums",
          [](const AnyFile& file, int64_t offset, int64_t nbytes) {
            return packed(file.volume()->checksums(offset, nbytes));
          },
          py::arg("offset"), py::arg("nbytes"))
      .def(
          "set_checksums",
          [](const AnyFile& file, int64_t offset, const py::object& sums) {
            file.volume()->set_checksums(offset, unpacked(Bytes(sums)));
          },
          py::arg("offset"), py::arg("sums"))
      .def("reserve", &AnyFile::reserve, py::arg("nbytes"), NoGil())
      .def("sync", &AnyFile::sync, NoGil())
      .def("close", &AnyFile::close, NoGil());
}

void bind_files(py::module_& module) {
  bind_any_file<File>(module, "File", "A file for direct transfers.")
      .def(py::init([](const std::filesystem::path& path, bool create, int drive, bool fine_alignment, bool read_only,
                       bool exclusive, bool checksums) {
             py::gil_scoped_release release;
             return std::make_shared<File>(path.native(),
                                           FileOptions{create, drive, fine_alignment, read_only, exclusive, checksums});
           }),
           py::arg("path"), py::kw_only(), py::arg("create") = false, py::arg("drive") = 0,
           py::arg("fine_alignment") = false, py::arg("read_only") = false, py::arg("exclusive") = false,
           py::arg("checksums") = false)
      .def_property_readonly("direct", &File::direct)
      .def_property_readonly("alignment", &File::alignment)
      .def_property_readonly("size_bytes", &File::size_bytes)
      .def("fileno", [](const File& file) { return file.descriptor()->fd(); })
      .def("__enter__", [](const std::shared_ptr<File>& file) { return file; })
      .def("__exit__", [](File& file, const py::args&) {
        py::gil_scoped_release release;
        file.close();
      });
  bind_any_file<StripedFile>(module, "StripedFile", "Files on several drives as one.")
      .def(py::init([](const std::vector<std::shared_ptr<File>>& files, const std::vector<int>& pattern,
                       int64_t stripe_bytes) {
             for (const auto& file : files) {
               if (file == nullptr) throw py::type_error("files must not hold None");
             }
             return std::make_shared<StripedFile>(files, pattern, stripe_bytes);
           }),
           py::arg("files"), py::kw_only(), py::arg("pattern"), py::arg("stripe_bytes"));
}

void bind_transfer(py::module_& module) {
  py::enum_<Priority>(module, "Priority", "Order of service: DEMAND, then PREFETCH, then WRITE_BACK.")
      .value("DEMAND", Priority::kDemand)
      .value("PREFETCH", Priority::kPrefetch)
      .value("WRITE_BACK", Priority::kWriteBack);
  py::class_<Transfer, std::shared_ptr<Transfer>>(module, "Transfer", py::is_final(),
                                                  "One read or write, under way or done.")
      .def_property_readonly("done", &Transfer::done)
      .def("wait", &wait_for_transfer, py::kw_only(), py::arg("with_team") = false);
}

void bind_engine(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(Timing, queued, submitted, done, bytes, drive, operation, priority, failed);
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine", py::is_final(), "Moves bytes on threads of its own.")
      .def(py::init([](const std::string& backend, int queue_depth, int64_t block_bytes, int rings,
                       std::shared_ptr<PinnedSlab> slab, int drives, const std::string& mix, bool iopoll, bool sqpoll,
                       double silence_seconds_max) {
             return make_engine({backend, queue_depth, block_bytes, rings, std::move(slab), drives, mix_of(mix), iopoll,
                                 sqpoll, silence_seconds_max});
           }),
           py::kw_only(), py::arg("backend") = "auto", py::arg("queue_depth") = 32, py::arg("block_bytes") = 1 << 20,
           py::arg("rings") = 1, py::arg("slab") = py::none(), py::arg("drives") = 1, py::arg("mix") = "interleaved",
           py::arg("iopoll") = false, py::arg("sqpoll") = false, py::arg("silence_seconds_max") = 300.0)
      .def_property_readonly("backend", &Engine::backend)
      .def_property_readonly("notes", [](const Engine& engine) { return decode_all(engine.notes()); })
      .def_property_readonly("block_bytes", [](const Engine& engine) { return engine.options().block_bytes; })
      .def("start_batch", &start_batch, py::arg("requests"), py::kw_only(), py::arg("sums_by_caller") = false)
      .def("verify", &verify, py::arg("file"), py::arg("offset"), py::arg("slab").none(false), py::arg("slab_offset"),
           py::arg("length"))
      .def("counters", &counters_of)
      .def("take_timings", &timings_of)
      .def("drain", &drain_engine)
      .def("close", &close_engine)
      .def("__enter__", [](const std::shared_ptr<Engine>& engine) { return engine; })
      .def("__exit__", [](Engine& engine, const py::object& type, const py::object&, const py::object&) {
        try {
          close_engine(engine);
        } catch (const IoFailure&) {
          if (type.is_none()) throw;  // otherwise what went wrong in the block matters more
        }
      });
}

py::list probe() {
  py::list list;
  for (const BackendProbe& one : probe_backends()) list.append(py::make_tuple(one.name, one.available, one.reason));
  return list;
}

py::object direct_alignment_of(const std::filesystem::path& path) {
  auto alignment = direct_alignment(path.native());
  if (!alignment) return py::none();
  return py::make_tuple(alignment->memory, alignment->offset);
}

}  // namespace
}  // namespace infinity::aio

PYBIND11_MODULE(_aio, module) {
  namespace aio = infinity::aio;
  module.doc() = "Asynchronous direct I/O between files and pinned memory. See csrc/aio/README.md.";
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const infinity::IoFailure& error) {
      aio::raise_io_error(error);
    }
  });
  aio::bind_slab(module);
  module.def("absent_bytes", &aio::absent_bytes, "Bytes of this process's slabs that are still to become present.");
  aio::bind_files(module);
  aio::bind_transfer(module);
  aio::bind_engine(module);
  module.def("probe", &aio::probe);
  module.def("crc32c_ways", [] {
    py::list names;
    for (const infinity::Crc32c& way : infinity::crc32c_ways()) names.append(way.name);
    return names;
  });
  module.def("page_checksums", &aio::page_checksums, py::arg("data"), py::kw_only(), py::arg("way") = "");
  module.def("direct_alignment", &aio::direct_alignment_of, py::arg("path"));
  if (aio::bind_faults != nullptr) aio::bind_faults(module, aio::change_options);
}
