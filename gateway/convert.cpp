#include "gateway/convert.h"

#include "temper/v1/gateway.pb.h"

namespace temper::gateway {

void ToProto(const OpenOptions& o, v1::GatewayOpenRequest* out) {
  out->set_session(o.session);
  out->set_group(o.group);
  out->set_rollout(o.rollout);
  out->set_attempt(o.attempt);
  out->set_task_id(o.task_id);
  out->set_family(o.family);
  if (o.sampling) {
    auto* s = out->mutable_sampling();
    s->set_temperature(o.sampling->temperature);
    s->set_top_p(o.sampling->top_p);
    s->set_top_k(o.sampling->top_k);
    s->set_min_p(o.sampling->min_p);
    s->set_max_tokens(o.sampling->max_tokens);
    s->set_repetition_stop(o.sampling->repetition_stop);
  }
  out->set_max_turns(o.max_turns);
  out->mutable_key_space()->set_seed(o.key_space.seed);
  out->mutable_key_space()->set_domain(o.key_space.domain);
  out->mutable_key_space()->set_a(o.key_space.a);
  out->mutable_key_space()->set_b(o.key_space.b);
  out->set_training(o.training);
  out->set_deadline_s(o.deadline_s);
  out->set_fresh(o.fresh);
}

OpenOptions FromProto(const v1::GatewayOpenRequest& in) {
  OpenOptions o;
  o.session = in.session();
  o.group = in.group();
  o.rollout = in.rollout();
  o.attempt = in.attempt();
  o.task_id = in.task_id();
  o.family = in.family();
  if (in.has_sampling()) {
    o.sampling = SamplingPolicy{.temperature = in.sampling().temperature(),
                                .top_p = in.sampling().top_p(),
                                .top_k = in.sampling().top_k(),
                                .min_p = in.sampling().min_p(),
                                .repetition_stop = in.sampling().repetition_stop(),
                                .max_tokens = in.sampling().max_tokens()};
  }
  o.max_turns = in.max_turns();
  o.key_space = {in.key_space().seed(), in.key_space().domain(), in.key_space().a(), in.key_space().b()};
  o.training = in.training();
  o.deadline_s = in.deadline_s();
  o.fresh = in.fresh();
  return o;
}

}  // namespace temper::gateway
