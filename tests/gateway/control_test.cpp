// The contract of GatewayControl, held by both of its forms: the gateway itself, and the client of one behind gRPC.
#include <grpcpp/impl/codegen/service_type.h>
#include <gtest/gtest.h>

#include "common/rpc.h"
#include "gateway/gateway.h"
#include "gateway/service.h"
#include "temper/v1/types.pb.h"
#include "tests/gateway/fake_policy.h"
#include "tests/gateway/fake_rollout.h"

namespace temper::gateway {
namespace {

struct LocalForm {
  explicit LocalForm(Gateway& gateway) : gateway_(gateway) {}
  GatewayControl& control() { return gateway_; }
  Gateway& gateway_;
};

struct RemoteForm {
  explicit RemoteForm(Gateway& gateway) {
    const std::string name = "temper-gateway-control-" + std::to_string(::getpid());
    auto fd = ListenAbstract(name);
    EXPECT_TRUE(fd.ok());
    service = NewGatewayService(gateway);
    server = std::make_unique<RpcServer>(std::move(*fd));
    server->Register(service.get());
    EXPECT_TRUE(server->Start().ok());
    client = NewGatewayClient("unix-abstract:" + name, 5);
  }
  GatewayControl& control() { return *client; }
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<RpcServer> server;
  std::unique_ptr<GatewayControl> client;
};

template <typename Form>
class ControlTest : public ::testing::Test {
 protected:
  ControlTest()
      : rollout_(FakePolicy::kEnd, [](const auto&) { return Script{.text = "ok"}; }),
        gateway_({.context_tokens = 1000}, policy_, rollout_, SystemClock::Get(), metrics_) {
    EXPECT_TRUE(gateway_.Start().ok());
    gateway_.SetBaseUrl("http://127.0.0.1:1/v1");
    form_ = std::make_unique<Form>(gateway_);
  }
  FakePolicy policy_;
  FakeRollout rollout_;
  Metrics metrics_;
  Gateway gateway_;
  std::unique_ptr<Form> form_;
};

using Forms = ::testing::Types<LocalForm, RemoteForm>;
TYPED_TEST_SUITE(ControlTest, Forms);

// A field lost on the wire, or a code changed by it, would make the two forms differ.
TYPED_TEST(ControlTest, OpenSealAbortStatus) {
  GatewayControl& control = this->form_->control();
  OpenOptions o;
  o.session = "e2.7.3";
  o.group = 2;
  o.rollout = 7;
  o.attempt = 3;
  o.task_id = "task-7";
  o.family = "count";
  o.sampling = SamplingPolicy{.temperature = 0.5f, .top_p = 0.75f, .top_k = 3, .min_p = 0.25f, .max_tokens = 9};
  o.max_turns = 4;
  o.key_space = {11, 1, 2, 7};
  o.deadline_s = 60;
  auto opened = control.Open(o);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  EXPECT_EQ(opened->base_url, "http://127.0.0.1:1/v1");
  // The gateway's own view of the same session: equal fields give the same key.
  EXPECT_EQ(this->gateway_.Open(o)->api_key, opened->api_key);
  // A session that is to be trained must have a choice to learn.
  OpenOptions of_one = o;
  of_one.training = true;
  of_one.sampling->top_k = 1;
  EXPECT_EQ(control.Open(of_one).status().code(), StatusCode::kInvalidArgument);
  o.max_turns = 5;
  EXPECT_EQ(control.Open(o).status().code(), StatusCode::kAlreadyExists);
  auto sealed = control.Seal("e2.7.3", 10);
  ASSERT_TRUE(sealed.ok()) << sealed.status().ToString();
  EXPECT_EQ(sealed->state, "sealed");
  EXPECT_EQ(sealed->trajectory->session(), "e2.7.3");
  EXPECT_EQ(sealed->trajectory->group(), 2);
  EXPECT_EQ(sealed->trajectory->rollout(), 7);
  EXPECT_EQ(sealed->trajectory->attempt(), 3);
  EXPECT_EQ(sealed->trajectory->task_id(), "task-7");
  EXPECT_EQ(sealed->trajectory->family(), "count");
  EXPECT_EQ(sealed->trajectory->outcome(), "");
  EXPECT_EQ(control.Seal("e2.7.3", 0)->trajectory->SerializeAsString(), sealed->trajectory->SerializeAsString());
  EXPECT_EQ(control.Seal("nobody", 0).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(control.Abort("nobody", "x").code(), StatusCode::kNotFound);
  o.session = "second";
  ASSERT_TRUE(control.Open(o).ok());
  EXPECT_EQ(control.GetStatus()->metrics.at("sessions_open"), 1);
  EXPECT_TRUE(control.Abort("second", "cancelled").ok());
  EXPECT_TRUE(control.Abort("second", "cancelled").ok());
  EXPECT_EQ(control.Seal("second", 0)->state, "aborted");
  EXPECT_EQ(control.GetStatus()->metrics.at("sessions_open"), 0);
  EXPECT_EQ(control.GetStatus()->base_url, "http://127.0.0.1:1/v1");
}

// A gateway that never comes must end the wait with an error.
TEST(GatewayClient, AnAbsentGatewayIsUnavailable) {
  OpenOptions o;
  o.session = "x";
  auto client = NewGatewayClient("unix-abstract:temper-no-such-gateway", 0.3);
  EXPECT_EQ(client->Open(o).status().code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace temper::gateway
