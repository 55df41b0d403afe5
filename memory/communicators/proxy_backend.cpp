// A c10d backend whose inside can be taken out and put back while the process group around it stays itself.
//
// Every operation goes to an inner backend (gloo, NCCL). Without one, the first operation calls `owner.make(is_pair)`
// in Python, which returns a Backend object; `drop` takes the inner one out; `owner.closed()` is called when the group
// is destroyed. Which kind the inner backend is, under which epoch and with whom it is made is the owner's business:
// no header of a particular backend is needed, so this compiles against any torch, with CUDA or without.
//
// Locks: `making_` is held while the owner makes one and is never waited for with the GIL; `pointer_` is held for a few
// instructions. The destructor of an inner backend joins threads, so it never runs with the GIL.
//
// In a group of one (`is_local`) an operation is a copy at most, and done here: NCCL would build a communicator for it,
// which holds up to half a gibibyte. A premultiplied sum, a send and a receive still go to an inner backend.
//
// What a base class does by itself stays its own where an inner backend must not be asked: splitting and shrinking
// (such a communicator shares memory with its parent), completion hooks (lost with the inner backend), allocation of
// tensors out of a backend's pool (the pool would have to outlive the drop).

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/version.h>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace py = pybind11;

namespace {

using c10d::Backend;
using c10d::Work;
using BackendPtr = c10::intrusive_ptr<Backend>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

// Lets the GIL go where this thread has it; operations may come from threads that never had it.
class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check()) {
      released_.emplace();
    }
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// What a group of one answers: its outputs are ready in the order of the caller's stream.
class DoneWork : public Work {
 public:
  DoneWork(c10d::OpType kind, Tensors outputs) : Work(0, kind), outputs_(std::move(outputs)) {
    std::vector<c10::Device> devices;
    for (const auto& output : outputs_) {
      if (!output.device().is_cpu() && std::find(devices.begin(), devices.end(), output.device()) == devices.end()) {
        devices.push_back(output.device());
      }
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future_->markCompleted(at::IValue(outputs_));
    finish();
  }

  bool wait(std::chrono::milliseconds) override {
    future_->wait(); // the caller's stream of now may be another one
    return true;
  }

  void synchronize() override {
    future_->wait();
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

WorkPtr done(c10d::OpType kind, Tensors outputs) {
  return c10::make_intrusive<DoneWork>(kind, std::move(outputs));
}

// Copies as a collective does: autograd does not see it, leaves that require gradients may be written.
void copy_flat(const at::Tensor& output, const at::Tensor& input) {
  at::AutoDispatchBelowADInplaceOrView guard;
  output.view({-1}).copy_(input.reshape({-1}));
}

void copy_each(const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK(outputs.size() == inputs.size(), "a group of one got ", inputs.size(), " inputs for ", outputs.size());
  for (size_t index = 0; index < outputs.size(); ++index) {
    copy_flat(outputs[index], inputs[index]);
  }
}

// The only member's tensors out of lists by member.
Tensors only(const TensorLists& lists) {
  Tensors found;
  for (const auto& list : lists) {
    TORCH_CHECK(list.size() == 1, "a group of one got ", list.size(), " tensors");
    found.push_back(list.front());
  }
  return found;
}

class ReloadableBackend : public Backend {
 public:
  ReloadableBackend(int rank, int size, std::string native, bool coalesces, bool is_local, py::object owner)
      : Backend(rank, size),
        native_(std::move(native)),
        coalesces_(coalesces),
        is_local_(is_local && size == 1),
        owner_(std::move(owner)) {}

  ReloadableBackend(const ReloadableBackend&) = delete;
  ReloadableBackend& operator=(const ReloadableBackend&) = delete;

  ~ReloadableBackend() override {
    if (!Py_IsInitialized()) {
      (void)owner_.release(); // the interpreter is gone, and with it the right to touch its objects
      return;
    }
    {
      WithoutGil without;
      inner_.reset();
    }
    py::gil_scoped_acquire gil;
    owner_ = py::object();
  }

  // -- the inside ---------------------------------------------------------------------------------------------------

  BackendPtr inner_or_null() const {
    std::lock_guard<std::mutex> lock(pointer_);
    return inner_;
  }

  // The inner backend, made if there is none. `is_pair`: two of the group are enough for what is about to be done.
  BackendPtr inner(bool is_pair = false) {
    if (auto found = inner_or_null()) {
      return found;
    }
    WithoutGil without;
    std::lock_guard<std::mutex> making(making_);
    uint64_t life = 0;
    {
      std::lock_guard<std::mutex> lock(pointer_);
      if (inner_) {
        return inner_;
      }
      life = life_;
    }
    BackendPtr made;
    {
      py::gil_scoped_acquire gil;
      made = owner_.attr("make")(is_pair).cast<BackendPtr>();
    }
    TORCH_CHECK(made, "no backend was made for group ", getGroupUid());
    std::optional<std::chrono::milliseconds> timeout;
    {
      std::lock_guard<std::mutex> lock(pointer_);
      TORCH_CHECK(life == life_, "group ", getGroupUid(), " was dropped while its ", native_, " backend was made");
      timeout = timeout_;
      inner_ = made;
    }
    made->setGroupUid(getGroupUid());
    made->setGroupDesc(getGroupDesc());
    made->setBoundDeviceId(getBoundDeviceId());
    if (timeout) {
      made->setTimeout(*timeout);
    }
    return made;
  }

  // Takes the inner backend out; it ends here unless somebody else holds it. False: there was none.
  bool drop(const std::string& how) {
    WithoutGil without;
    BackendPtr old;
    {
      std::lock_guard<std::mutex> lock(pointer_);
      old = std::move(inner_);
      inner_ = BackendPtr();
      ++life_;
    }
    if (!old) {
      return false;
    }
    if (how == "shutdown") {
      old->shutdown();
    } else if (how == "abort") {
      old->abort();
    }
    return true;
  }

  // -- facts --------------------------------------------------------------------------------------------------------

  const std::string getBackendName() const override {
    return native_;
  }

  bool supportsCoalescing() const override {
    return coalesces_;
  }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    auto found = inner_or_null();
    TORCH_CHECK(found, "group ", getGroupUid(), " has no live ", native_, " backend, so no options of one");
    return found->getBackendOptions();
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    BackendPtr found;
    {
      std::lock_guard<std::mutex> lock(pointer_);
      timeout_ = timeout;
      found = inner_;
    }
    if (found) {
      found->setTimeout(timeout);
    }
  }

  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid); // functional collectives find the group by it, inner backend or none
    if (auto found = inner_or_null()) {
      found->setGroupUid(uid);
    }
  }

  void setSequenceNumberForGroup() override {
    if (auto found = inner_or_null()) {
      found->setSequenceNumberForGroup();
    }
  }

  uint64_t getSequenceNumberForGroup() override {
    auto found = inner_or_null();
    return found ? found->getSequenceNumberForGroup() : 0;
  }

  void waitForPendingWorks() override {
    if (auto found = inner_or_null()) {
      found->waitForPendingWorks();
    }
  }

  c10d::ErrorType getError() override {
    auto found = inner_or_null();
    return found ? found->getError() : c10d::ErrorType::SUCCESS;
  }

  void abort() override {
    drop("abort");
    tell_closed();
  }

  void shutdown() override {
    drop("shutdown");
    tell_closed();
  }

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 12)
  void suspend() override {
    if (auto found = inner_or_null()) {
      found->suspend();
    }
  }

  void resume() override {
    if (auto found = inner_or_null()) {
      found->resume();
    }
  }

  std::unordered_map<std::string, uint64_t> getMemoryStats() override {
    auto found = inner_or_null();
    return found ? found->getMemoryStats() : std::unordered_map<std::string, uint64_t>{};
  }
#endif

  // -- operations ---------------------------------------------------------------------------------------------------

  void startCoalescing() override {
    if (!is_local_) {
      inner()->startCoalescing();
    }
  }

  WorkPtr endCoalescing() override {
    return is_local_ ? done(c10d::OpType::COALESCED, {}) : inner()->endCoalescing();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return is_local_ ? done(c10d::OpType::BROADCAST, tensors) : inner()->broadcast(tensors, opts);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return is_local(opts.reduceOp) ? done(c10d::OpType::ALLREDUCE, tensors) : inner()->allreduce(tensors, opts);
  }

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return inner()->allreduce_sparse(tensors, opts);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return is_local(opts.reduceOp) ? done(c10d::OpType::ALLREDUCE_COALESCED, tensors)
                                   : inner()->allreduce_coalesced(tensors, opts);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return is_local(opts.reduceOp) ? done(c10d::OpType::REDUCE, tensors) : inner()->reduce(tensors, opts);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    if (is_local_) {
      const auto mine = only(outputs);
      copy_each(mine, inputs);
      return done(c10d::OpType::ALLGATHER, mine);
    }
    return inner()->allgather(outputs, inputs, opts);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    if (is_local_) {
      copy_flat(output, input);
      return done(c10d::OpType::_ALLGATHER_BASE, {output});
    }
    return inner()->_allgather_base(output, input, opts);
  }

  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    if (is_local_) {
      TORCH_CHECK(outputs.size() == 1, "a group of one got outputs for ", outputs.size());
      copy_each(outputs.front(), inputs);
      return done(c10d::OpType::ALLGATHER_COALESCED, outputs.front());
    }
    return inner()->allgather_coalesced(outputs, inputs, opts);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    if (is_local_) {
      copy_each(outputs, inputs);
      return done(c10d::OpType::COALESCED, outputs);
    }
    return inner()->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    if (is_local_) {
      const auto mine = only(outputs);
      copy_each(mine, inputs);
      return done(c10d::OpType::GATHER, mine);
    }
    return inner()->gather(outputs, inputs, opts);
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override {
    if (is_local_) {
      copy_each(outputs, only(inputs));
      return done(c10d::OpType::SCATTER, outputs);
    }
    return inner()->scatter(outputs, inputs, opts);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override {
    if (is_local(opts.reduceOp)) {
      copy_each(outputs, only(inputs));
      return done(c10d::OpType::REDUCE_SCATTER, outputs);
    }
    return inner()->reduce_scatter(outputs, inputs, opts);
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    if (is_local(opts.reduceOp)) {
      copy_flat(output, input);
      return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
    }
    return inner()->_reduce_scatter_base(output, input, opts);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    if (is_local(opts.reduceOp)) {
      copy_each(outputs, inputs);
      return done(c10d::OpType::COALESCED, outputs);
    }
    return inner()->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }

  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override {
    if (is_local_) {
      copy_flat(output, input);
      return done(c10d::OpType::ALLTOALL_BASE, {output});
    }
    return inner()->alltoall_base(output, input, output_splits, input_splits, opts);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    if (is_local_) {
      copy_each(outputs, inputs);
      return done(c10d::OpType::ALLTOALL, outputs);
    }
    return inner()->alltoall(outputs, inputs, opts);
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waits_for_all) override {
    if (!is_local_) {
      inner()->monitoredBarrier(opts, waits_for_all);
    }
  }

  WorkPtr send(Tensors& tensors, int to_rank, int tag) override {
    return inner(true)->send(tensors, to_rank, tag);
  }

  WorkPtr recv(Tensors& tensors, int from_rank, int tag) override {
    return inner(true)->recv(tensors, from_rank, tag);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return inner(true)->recvAnysource(tensors, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return is_local_ ? done(c10d::OpType::BARRIER, {}) : inner()->barrier(opts);
  }

 private:
  void tell_closed() {
    py::gil_scoped_acquire gil;
    owner_.attr("closed")();
  }

  bool is_local(const c10d::ReduceOp& op) const {
    return is_local_ && op.op_ != c10d::ReduceOp::PREMUL_SUM;
  }

  const std::string native_;
  const bool coalesces_;
  const bool is_local_;
  py::object owner_;
  std::mutex making_;
  mutable std::mutex pointer_;
  BackendPtr inner_;
  uint64_t life_ = 0;
  std::optional<std::chrono::milliseconds> timeout_;
};

} // namespace

PYBIND11_MODULE(myxa_proxy_backend, m) {
  py::module_::import("torch._C._distributed_c10d"); // Backend's own binding, which the class below derives from
  py::class_<ReloadableBackend, Backend, c10::intrusive_ptr<ReloadableBackend>>(m, "ReloadableBackend")
      .def(py::init<int, int, std::string, bool, bool, py::object>(),
           py::arg("rank"),
           py::arg("size"),
           py::arg("native"),
           py::arg("coalesces"),
           py::arg("is_local"),
           py::arg("owner"))
      .def("drop", &ReloadableBackend::drop, py::arg("how") = "")
      .def(
          "inner",
          [](ReloadableBackend& self) -> py::object {
            auto found = self.inner_or_null();
            return found ? py::cast(found) : py::none();
          })
      .def("build", [](ReloadableBackend& self) { self.inner(); })
      .def("_set_default_timeout", &ReloadableBackend::setTimeout, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_live", [](ReloadableBackend& self) { return bool(self.inner_or_null()); })
      // Methods of one kind of backend only (`_comm_ptr`, `register_mem_pool`, `options`): the inner one's.
      .def("__getattr__", [](ReloadableBackend& self, const std::string& name) -> py::object {
        auto found = self.inner_or_null();
        if (!found) {
          const std::string why = "'" + name + "': group " + self.getGroupUid() + " has no live " +
              self.getBackendName() + " backend now; its first operation makes one";
          PyErr_SetString(PyExc_AttributeError, why.c_str());
          throw py::error_already_set();
        }
        return py::getattr(py::cast(found), name.c_str());
      });
}
